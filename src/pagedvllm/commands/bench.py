"""`pagedvllm bench NAME`: measurements of this engine on this machine, as JSON."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

BENCHMARKS = {
    "scheduler": (
        "pagedvllm.commands.bench_scheduler",
        "schedule() and update() alone, without a model",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    for name, (module, help_line) in BENCHMARKS.items():
        sub = names.add_parser(name, help=help_line)
        import_module(module).add_arguments(sub)
        sub.add_argument("--output", metavar="FILE", help="write the JSON there as well")


def run(args: argparse.Namespace) -> int:
    result: dict[str, Any] = import_module(BENCHMARKS[args.benchmark][0]).measure(args)
    text = json.dumps(result, indent=1)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text + "\n")
    print(text)
    return 0
