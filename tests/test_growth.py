"""The package grows chapter by chapter: what is imported when, and what a truncated copy holds.

That each notebook runs on its truncated package is proved by `pytest --nbval` itself (conftest.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagedvllm.teach import roadmap, truncate

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = [c.id for c in roadmap.read(ROOT) if c.modules]


def test_modules_import_only_their_own_and_earlier_chapters():
    assert truncate.violations(ROOT) == []


def small(root: Path, **files: str) -> Path:
    """A package of two chapters: `a` and `sub.b` in the first, `c` in the second."""
    package = root / "src/pagedvllm"
    texts = {"__init__": "", "a": "", "sub/__init__": "", "sub/b": "", "c": "", "teach/__init__": ""} | files
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(text)
    (package / "py.typed").write_text("")
    (package / "sub/table.json").write_text("{}")
    (root / "book").mkdir(exist_ok=True)
    chapters = ('id = "1"\ntitle = ""\nmodules = ["a", "sub.b"]', 'id = "2"\ntitle = ""\nmodules = ["c"]')
    (root / "book/roadmap.toml").write_text("".join(f"[[chapter]]\n{c}\n" for c in chapters))
    return root


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, []),
        ({"a": "import pagedvllm.c"}, ["chapter 1: a imports c, of a later chapter"]),
        ({"a": "from pagedvllm import c"}, ["chapter 1: a imports c, of a later chapter"]),
        ({"sub/b": "from ..c import x"}, ["chapter 1: sub.b imports c, of a later chapter"]),
        ({"a": "try:\n    import pagedvllm.c\nfinally:\n    pass"}, ["chapter 1: a imports c, of a later chapter"]),
        ({"a": "class K:\n    from pagedvllm.c import x"}, ["chapter 1: a imports c, of a later chapter"]),
        ({"c": "from pagedvllm.a import x"}, []),
        ({"a": "def f():\n    import pagedvllm.c"}, []),
        ({"a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pagedvllm.c import x"}, []),
        ({"c": "from pagedvllm.teach import x"}, ["chapter 2: c imports teach, which the engine never does"]),
        ({"c": "import pagedvllm.teach.live"}, ["chapter 2: c imports teach, which the engine never does"]),
        ({"d": ""}, ["d: in no chapter"]),
    ],
)  # fmt: skip
def test_violations(tmp_path, files, found):
    assert truncate.violations(small(tmp_path, **files)) == found


def test_a_module_that_does_not_exist(tmp_path):
    root = small(tmp_path)
    (root / "src/pagedvllm/c.py").unlink()
    assert truncate.violations(root) == ["chapter 2: c does not exist"]


def test_what_a_truncated_copy_holds(tmp_path):
    root = small(tmp_path / "all")
    truncate.write("1", tmp_path / "one", root)
    found = sorted(str(f.relative_to(tmp_path / "one")) for f in (tmp_path / "one").rglob("*") if f.is_file())
    names = ["__init__.py", "a.py", "py.typed", "sub/__init__.py", "sub/b.py", "sub/table.json", "teach/__init__.py"]
    assert found == ["book/roadmap.toml", *(f"src/pagedvllm/{n}" for n in names)]


@pytest.mark.parametrize("chapter", WRITTEN)
def test_all_modules_of_a_truncated_copy_can_be_imported(tmp_path, chapter):
    source = truncate.write(chapter, tmp_path, ROOT)
    names = [f"pagedvllm.{m}" for m in roadmap.modules_until(chapter)]
    code = (
        "import sys, importlib\n"
        f"for name in {names}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name != 'triton' or sys.platform == 'linux': raise\n"  # macOS has none
        "import pagedvllm.teach as teach\n"
        f"assert teach.chapter({chapter!r})\n"
        "ours = [m.__file__ for n, m in sys.modules.items() if n.startswith('pagedvllm')]\n"
        "bad = [file for file in ours if not file.startswith(sys.argv[1])]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(source)], check=True, env={"PYTHONPATH": str(source), "PATH": ""})
