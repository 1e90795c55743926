"""`pagedvllm check`: what this machine has, and whether the engine works on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pagedvllm import embedded
from pagedvllm.hub import EMBEDDED_MODEL

PACKAGES = (
    "pagedvllm",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "triton",
)
OPTIONAL = ("triton",)  # there is none for macOS
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-model",
        action="store_true",
        help="do not fetch, load and run the embedded model",
    )
    parser.add_argument(
        "--kernels",
        nargs="*",
        type=int,
        metavar="CC",
        help="also compile all Triton kernels for every GPU generation, or for these"
        " compute capabilities (90 is sm_90); takes minutes, needs no GPU",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as one JSON object"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when all that must work does, else 1."""
    report: dict[str, Any] = {}
    problems: list[str] = []
    parts = _parts(args.no_model)
    if args.kernels is not None:
        parts["kernels"] = lambda: _kernels(args.kernels, problems)
    for name, part in parts.items():
        try:
            report[name] = part()
        except (
            Exception
        ) as error:  # a report names every fault: none may hide what comes after it
            report[name] = {"error": f"{type(error).__name__}: {error}"}
            problems.append(f"{name}: {error}")
    problems += [
        f"packages: {name} is not installed" for name in _missing(report["packages"])
    ]
    report |= {"problems": problems, "ok": not problems}
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    return 0 if not problems else 1


def _parts(no_model: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    skipped = {"self-test": "not run (--no-model)"}
    return {
        "system": _system,
        "packages": _packages,
        "devices": _devices,
        "embedded model": _embedded,
        "self-test": (lambda: skipped) if no_model else _self_test,
    }


def _system() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu cores": usable,
        "memory GiB": round(memory / 2**30, 1),
    }


def _packages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _missing(packages: dict[str, Any]) -> list[str]:
    return [
        name
        for name in PACKAGES
        if name not in OPTIONAL and packages.get(name) == "not installed"
    ]


def _devices() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cpu threads": torch.get_num_threads(), "cuda": "none"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found["cuda" if index == 0 else f"cuda:{index}"] = (
            f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.1f} GiB"
        )
    return found


def _embedded() -> dict[str, Any]:
    state = (
        "ready"
        if embedded.is_ready()
        else "not yet fetched (its first use does that, 93 MB)"
    )
    return {"directory": str(embedded.location()), "state": state}


def _self_test() -> dict[str, Any]:
    """Load the embedded model in float32 and ask it a question whose greedy answer is known.

    Raises:
        RuntimeError: it answers something else.
    """
    from pagedvllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(EMBEDDED_MODEL, engine="reference", dtype="float32")
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=12)
    output = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)[
        0
    ].outputs[0]
    if output.text != ANSWER:
        raise RuntimeError(
            f"to {QUESTION!r} the model answers {output.text!r}, and should answer {ANSWER!r}"
        )
    return {
        "question": QUESTION,
        "answer": output.text,
        "load s": round(loaded - start, 1),
        "generate s": round(time.perf_counter() - loaded, 1),
        "self-test": "passed",
    }


def _kernels(targets: list[int], problems: list[str]) -> dict[str, Any]:
    """A row for each kernel, form and target; what is wrong with it goes to `problems`."""
    from pagedvllm.commands.check_kernels import table

    rows, faults = table(targets)
    problems += [f"kernels: {fault}" for fault in faults]
    return rows


def _as_text(report: dict[str, Any]) -> str:
    lines = []
    for name, part in report.items():
        if isinstance(part, dict):
            width = max([14, *map(len, part)])
            lines += [name, *(f"  {key:<{width}} {value}" for key, value in part.items())]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    return "\n".join(
        [*lines, "all is well" if report["ok"] else f"{len(report['problems'])} problem(s)"]
    )
