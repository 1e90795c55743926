"""The cases of the labs, one module a lab: `TASKS`, a dict of `pagedvllm.teach.labs.Task`."""
