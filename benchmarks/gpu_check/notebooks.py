"""The chapter notebooks with PAGEDVLLM_DEVICE=cuda, where their model is on the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.gpu_check.stage import Outcome, Setup
from benchmarks.record import ROOT


def run(setup: Setup) -> Outcome:
    from pagedvllm import embedded

    if not embedded.is_ready() and not os.environ.get("PAGEDVLLM_MODEL"):
        return Outcome(not_run="no model")
    if missing := [name for name in ("nbval", "pytest", "ipykernel") if find_spec(name) is None]:
        return Outcome(not_run=f"no {missing[0]}")
    chapters = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "book").glob("ch*.ipynb"))
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "-p", "no:cacheprovider", *chapters]
    if find_spec("xdist") is not None and not setup.dry:
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    if setup.dry:
        command.append("--collect-only")
    environment = os.environ | {"PAGEDVLLM_DEVICE": "cpu" if setup.dry else "cuda"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    outcome = Outcome("The chapter notebooks run on the GPU.", {"notebooks": len(chapters), "cells": last.strip("= ")})
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    outcome.check(done.returncode == 0, f"{', '.join(failed[:5]) or last}\n{done.stderr[-1000:]}")
    return outcome
