"""A repository of two chapters in a temporary folder: the book's machinery without the real engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "src/pagedvllm/__init__.py": '"""The package."""\n',
    "src/pagedvllm/py.typed": "",
    "src/pagedvllm/hub.py": '"""Models."""\n\n\ndef resolve_model(name=None):\n    return None\n',
    "src/pagedvllm/kv/__init__.py": '"""The cache."""\n',
    "src/pagedvllm/kv/names.json": '["a"]\n',
    "src/pagedvllm/kv/pool.py": '''"""The pool."""

from __future__ import annotations

SIZE = 4


def pages(n: int) -> int:
    """Pages that `n` tokens fill."""
    return -(-n // SIZE)


class Pool:
    """All pages."""

    def __init__(self, free: int) -> None:
        self.free = free

    def take(self) -> int:
        self.free -= 1
        return self.free
''',
    "src/pagedvllm/later.py": '"""Of chapter 2."""\n\nfrom pagedvllm.kv.pool import pages\n\nTWO = pages(8)\n',
    "book/roadmap.toml": """
[[chapter]]
id = "1"
title = "One"
notebook = "book/ch01.ipynb"
lab = "labs/lab01.ipynb"
modules = ["hub", "kv.pool"]
core = ["kv.pool:pages", "kv.pool:Pool.take"]
settings = { engine = "reference" }

[[chapter]]
id = "2"
title = "Two"
notebook = "book/ch02.ipynb"
modules = ["later"]
""",
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["book", "labs"]\nnorecursedirs = ["_build"]\n',
}
HEAD = "from pagedvllm import teach\nfrom pagedvllm.teach import extends, restore"
PAGES = '''@extends("pagedvllm.kv.pool")
def pages(n: int) -> int:
    """Pages that `n` tokens fill."""
    return -(-n // SIZE)'''
TAKE = """@extends("pagedvllm.kv.pool:Pool")
def take(self) -> int:
    self.free -= 1
    return self.free"""
CHAPTER_1 = [
    HEAD,
    PAGES,
    TAKE,
    "from pagedvllm.kv.pool import Pool\n\nprint(pages(9))",
    "Pool(3).take()",
    ("import time\n\ntime.time()", ["nbval-ignore-output"]),
]
LAB_1 = [HEAD, "from pagedvllm.kv.pool import pages\n\nprint([pages(n) for n in (0, 1, 4, 5)])"]
CHAPTER_2 = [HEAD, "from pagedvllm.later import TWO\n\nprint(TWO)"]


def notebook(cells: list[Any]) -> Any:
    """Code cells, each a source or (source, tags)."""
    out = nbformat.v4.new_notebook()
    for number, cell in enumerate(cells):
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        new = nbformat.v4.new_code_cell(source, metadata={"tags": tags} if tags else {})
        new.id = f"cell-{number}"
        out.cells.append(new)
    return out


def make(root: Path) -> Path:
    """Write the repository, its notebooks without outputs."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copytree(ROOT / "src/pagedvllm/teach", root / "src/pagedvllm/teach")
    for name in ("conftest.py", "nbval.cfg"):
        shutil.copy(ROOT / name, root / name)
    for name, cells in (("book/ch01", CHAPTER_1), ("labs/lab01", LAB_1), ("book/ch02", CHAPTER_2)):
        write(root / f"{name}.ipynb", cells)
    return root


def write(path: Path, cells: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook(cells), path)


def run(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` in the repository, with its own package."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PAGEDVLLM_"))}
    clean |= {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-m", *command], cwd=root, env=clean, capture_output=True, text=True)


def teach(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(root, "pagedvllm.teach", *arguments)


def nbval(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(root, "pytest", "--nbval", "-q", "-p", "no:cacheprovider", "--color=no", *arguments, **environment)
