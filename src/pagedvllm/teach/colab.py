"""Google Colab: install what the package needs, and never another torch than the machine's own."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pagedvllm.teach.roadmap import ROOT

KEPT = ("torch", "triton", "numpy")  # built for the machine's card and driver, and loaded perhaps


def requirements(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """What pyproject.toml asks for, without those that must stay as they are."""
    asked = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    return [r for r in asked if re.split(r"[^\w-]", r)[0] not in KEPT]


def install() -> None:
    """Complete the packages with pip. Raises RuntimeError with pip's last words when it cannot."""
    from pagedvllm.teach.helpers import installed

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write("".join(f"{name}=={installed(name)}\n" for name in KEPT if installed(name)))
        pins.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", pins.name, *requirements()]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("pip could not install the book's requirements:\n" + done.stderr[-1000:])
