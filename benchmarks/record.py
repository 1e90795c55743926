"""The form of a record under benchmarks/ and evidence/: what the page of measured claims is made from."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def source_sha256(package: Path = ROOT / "src" / "pagedvllm") -> str:
    """One hash of all Python files of the package: each file's relative path, then its bytes, in order of the paths."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def record(
    claim: str, result: dict[str, Any], *, command: str, environment: dict[str, Any], details: dict[str, Any]
) -> dict[str, Any]:
    """A record of a run that was made now, on the CPU, from the working tree."""
    return {
        "claim": claim,
        "hardware": f"{environment['cores']} cores of {environment['cpu']}",
        "device": "cpu",
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "HEAD"),
        "source_sha256": source_sha256(),
        "environment": {name: str(value) for name, value in environment.items() if name not in ("cpu", "cores")},
        "command": command,
        "result": result,
        "details": details,
    }
