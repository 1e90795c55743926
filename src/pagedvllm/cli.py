"""The `pagedvllm` command: a table of commands, each imported when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from pagedvllm import __version__

COMMANDS = {
    "generate": ("pagedvllm.commands.generate", "generate text once, offline"),
    "replay": (
        "pagedvllm.commands.replay",
        "run a workload through scheduler and KV-cache manager, without a model",
    ),
    "bench": (
        "pagedvllm.commands.bench",
        "measure the engine on this machine, as JSON",
    ),
    "check": (
        "pagedvllm.commands.check",
        "report on this machine and test the engine on it",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code. An error a user can mend is one line on stderr, not a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pagedvllm", description="A complete LLM serving engine that a book builds."
    )
    parser.add_argument("--version", action="version", version=f"pagedvllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((a for a in args if a in COMMANDS), None)
    modules = {}
    for name, (module, help_line) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=help_line, description=help_line[0].upper() + help_line[1:] + "."
        )
        if name == chosen:  # the others would cost their imports for nothing
            modules[name] = import_module(module)
            modules[name].add_arguments(sub)
    options = parser.parse_args(args)
    try:
        return int(modules[options.command].run(options))
    except BrokenPipeError:  # the reader of our output has gone, as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("PAGEDVLLM_TRACEBACK"):
            raise
        print(f"pagedvllm {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
