"""One module for each command of `pagedvllm`; cli.py imports a module when its command is called."""
