"""One prepared check of the engine on a GPU; every stage bounded in time, none stopping the others.

usage: python -m benchmarks.gpu_check [--dry] [STAGE ...] [--evidence DIR] [--seconds N]

It writes a record for each stage that passed, evidence/gpu_STAGE_CARD.json, in the format of evidence/README.md.
Exit status 1: a stage failed. --dry: toy sizes on the CPU, kernels in Triton's interpreter, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
START = time.monotonic()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="only these")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU; writes nothing")
    parser.add_argument("--evidence", type=Path, default=ROOT / "evidence", help="where records go")
    parser.add_argument("--seconds", type=float, default=0.0, help="for all stages together")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # run the stages here, write outcomes there
    options = parser.parse_args(argv)
    if options.dry:  # before Triton is imported: kernels are decorated for the interpreter or for a GPU
        os.environ |= {"TRITON_INTERPRET": "1", "PAGEDVLLM_DEVICE": "cpu"}
    if find_spec("triton") is None:
        print("gpu-check: not run: no triton")
        return 0 if options.dry else 1
    if options.child:
        return child(options.stages, options.dry, options.seconds, options.child)
    return check(options.stages, options.dry, options.evidence, options.seconds)


def child(names: list[str], dry: bool, seconds: float, outcomes: Path) -> int:
    """Run stages in this process, and write what each of them found."""
    from benchmarks.gpu_check.stage import Setup, run_stage

    for name in names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_stage(name, Setup(dry, seconds, Path(folder)))
        found = asdict(outcome) | {"seconds": time.monotonic() - start}
        (outcomes / f"{name}.json").write_text(json.dumps(found, default=str))
    return 0


def check(names: list[str], dry: bool, evidence: Path, seconds: float) -> int:
    from benchmarks.gpu_check.stage import STAGES, TOTAL_SECONDS

    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no stage {unknown[0]!r}; there are: {', '.join(known)}")
    stages = [known[name] for name in names] or list(STAGES)
    seconds = seconds or (300.0 if dry else TOTAL_SECONDS)
    card = "" if dry else gpu()
    print(f"gpu-check on {card or 'the CPU, dry'}: {len(stages)} stages, at most {seconds:.0f} s", flush=True)
    summary, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        # On a GPU each in a process of its own: after a bad address a process is of no more use.
        groups = [stages] if dry else [[stage] for stage in stages]
        for group in groups:
            left = seconds - (time.monotonic() - START)
            limit = left if dry else min(group[0].seconds, left)
            ended = run_child([stage.name for stage in group], dry, limit, Path(folder))
            for stage in group:
                found = read(Path(folder, f"{stage.name}.json"), ended)
                failed |= bool(found["faults"])
                summary.append(f"{stage.name:11} {found['seconds']:5.0f} s  {verdict(found)}")
                print(f"== {summary[-1]}", *(f"   {k}: {v}" for k, v in found["result"].items()), sep="\n", flush=True)
                print(*(f"   fault: {fault}" for fault in found["faults"]), sep="\n", flush=True)
                if not dry and not found["faults"] and not found["not_run"]:
                    write(evidence, stage.name, card, found)
    print("\n== Summary", *summary, f"== {time.monotonic() - START:.0f} s", sep="\n")
    return int(failed)


def run_child(names: list[str], dry: bool, limit: float, outcomes: Path) -> str:
    """How it ended, if it did not end well."""
    if limit < 5:
        return "not started: the time was up"
    print(f"\n== {', '.join(names)}: at most {limit:.0f} s", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", str(outcomes), "--seconds", str(limit), *names]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command + ["--dry"] * dry, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            return f"stopped after {limit:.0f} s"
    return f"the process ended with status {status}" if status else ""


def read(file: Path, ended: str) -> dict[str, Any]:
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"claim": "", "result": {}, "faults": [ended or "no outcome"], "details": {}, "not_run": "", "seconds": 0.0}


def verdict(found: dict[str, Any]) -> str:
    if found["not_run"]:
        return f"not run: {found['not_run']}"
    return "FAILED" if found["faults"] else "passed"


def gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu-check: torch sees no CUDA device (--dry runs everything at toy size on the CPU)")
    return torch.cuda.get_device_name()


def write(folder: Path, stage: str, card: str, found: dict[str, Any]) -> None:
    from benchmarks.record import record

    slug = re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_")
    entry = record(
        found["claim"],
        found["result"],
        command=f"make gpu-check ARGS={stage}",
        environment=environment(),
        details=found["details"] | {"seconds": round(found["seconds"], 1)},
        gpu=card,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu_{stage}_{slug}.json").write_text(json.dumps(entry, indent=2) + "\n", "utf-8")


def environment() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "CUDA of torch": torch.version.cuda}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, IndexError, subprocess.CalledProcessError):
        found["driver"] = "unknown"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
