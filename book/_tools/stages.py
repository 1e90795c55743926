"""Everything that `make test` proves, one announced and timed stage after the other; the first failure stops.

Usage: stages.py [NAME ...]   all stages, or the named ones
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
TOOLS = "book/_tools"
CHECKED = ["src", "tests", "benchmarks", "conftest.py", TOOLS, "book/_ext"]


@dataclass(frozen=True)
class Stage:
    """One stage: its name, what it proves, and the commands that prove it."""

    name: str
    proves: str
    commands: tuple[tuple[str, ...], ...]
    one_thread: bool = False  # several kernels run at once: two with two threads each are many times slower


def python(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, *arguments)


STAGES = (
    Stage(
        "lint",
        "style and types",
        (
            python("-m", "ruff", "check", *CHECKED),
            python("-m", "ruff", "format", "--check", *CHECKED),
            python("-m", "mypy"),
            python("-m", "mypy", "--allow-subclassing-any", "--ignore-missing-imports", TOOLS, "book/_ext"),
        ),
    ),
    Stage(
        "model",
        "the embedded model is here (93 MB to download, once)",
        (python("-c", "from pagedvllm.hub import resolve_model; resolve_model(None)"),),
    ),
    Stage(
        "unit",
        "the package",
        (python("-m", "pytest", "-q", "tests", "--ignore=tests/site", "-n", "2", "--dist", "loadfile"),),
        one_thread=True,
    ),
    Stage(
        "gpu-check",
        "the prepared check for a GPU, at toy size in Triton's interpreter",
        (python("-m", "benchmarks.gpu_check", "--dry"),),
        one_thread=True,
    ),
    Stage(
        "notebooks",
        "every notebook gives its stored outputs, on the package as it stands after its chapter",
        (python("-m", "pytest", "-q", "--nbval", "book", "labs", "-n", "2", "--dist", "loadfile"),),
        one_thread=True,
    ),
    Stage("live cells", "live source cells are the package's own code", (python("-m", "pagedvllm.teach", "check"),)),
    Stage(
        "altered outputs",
        "an altered stored output fails, in its own cell alone, with every live cell installed",
        (python("-m", "pagedvllm.teach", "alter"),),
        one_thread=True,
    ),
    Stage("book", "both editions build without a warning", (python(f"{TOOLS}/vendor.py"), python(f"{TOOLS}/build.py"))),
    Stage("catalogues", "the Chinese edition is whole", (python(f"{TOOLS}/catalogues.py", "check"),)),
    Stage(
        "site",
        "the built pages, in Chromium where there is one",
        (python("-m", "pytest", "-q", "tests/site", "-n", "2", "-rs", "--no-fold-skipped"),),
    ),
)


def run(command: tuple[str, ...], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Run one command, passing its output on as it comes; returns its status and pytest's closing lines."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None  # it is a pipe
    kept = bytearray()
    while chunk := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
        kept += chunk
    lines = kept.decode("utf-8", "replace").splitlines()
    closing = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed|skipped|error).* in [\d.]+s", line)]
    return process.wait(), closing


def run_stage(stage: Stage, title: str) -> tuple[bool, str]:
    """Run a stage's commands until one fails; returns whether all passed, and the stage's line in the summary."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if stage.one_thread:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    print(f"\n== {title}: {stage.proves}", flush=True)
    start, closing, status = time.monotonic(), [], 0
    for command in stage.commands:
        status, lines = run(command, environment)
        closing += lines
        if status != 0:
            break
    seconds = time.monotonic() - start
    verdict = "passed" if status == 0 else f"FAILED (exit status {status})"
    print(f"== {stage.name}: {verdict}, {seconds:.0f} s", flush=True)
    return status == 0, "  ".join([f"{stage.name:16} {seconds:5.0f} s  {verdict}", *closing])


def chosen(names: Iterable[str]) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no stage {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(STAGES)


def main() -> int:
    stages = chosen(sys.argv[1:])
    start, summary, passed = time.monotonic(), [], True
    for number, stage in enumerate(stages, 1):
        passed, line = run_stage(stage, f"{number}/{len(stages)} {stage.name}")
        summary.append(line)
        if not passed:
            break
    print("\n== Summary\n" + "\n".join(summary))
    left = [stage.name for stage in stages[len(summary) :]]
    if left:
        print("not run: " + ", ".join(left))
    print(f"== {'All stages passed' if passed else 'Stopped at the first failure'}, {time.monotonic() - start:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
