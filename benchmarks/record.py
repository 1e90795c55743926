"""The form of a record under benchmarks/ and evidence/: what the page of measured claims is made from."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """What is checked out; PAGEDVLLM_COMMIT says it where a copy without git runs."""
    if named := os.environ.get("PAGEDVLLM_COMMIT"):
        return named
    try:
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: a copy without git, see source_sha256"


def source_sha256(package: Path = ROOT / "src" / "pagedvllm") -> str:
    """One hash of all Python files of the package: each file's relative path, then its bytes, in order of the paths."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def record(
    claim: str,
    result: dict[str, Any],
    *,
    command: str,
    environment: dict[str, Any],
    details: dict[str, Any],
    gpu: str = "",
) -> dict[str, Any]:
    """A record of a run that was made now, from the working tree: on the CPU, or on the GPU of that name."""
    return {
        "claim": claim,
        "hardware": gpu or f"{environment['cores']} cores of {environment['cpu']}",
        "device": "cuda" if gpu else "cpu",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "source_sha256": source_sha256(),
        "environment": {name: str(value) for name, value in environment.items() if name not in ("cpu", "cores")},
        "command": command,
        "result": result,
        "details": details,
    }
