"""What every notebook of the book keeps to (CONTRIBUTING.md): sizes, tags, stored outputs."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from pagedvllm.teach import notebooks, roadmap

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = list(roadmap.notebooks(ROOT))


@pytest.fixture(params=NOTEBOOKS)
def cells(request):
    return notebooks.code_cells(notebooks.read(ROOT / request.param))


def lines(cell) -> int:
    return cell.source.count("\n") + 1


def test_cells_fit_the_eye(cells):
    kernels = [c for c in cells if "@triton." in c.source]
    assert [c.source for c in cells if lines(c) > (80 if c in kernels else 40)] == []
    assert statistics.median(map(lines, cells)) <= 8
    assert len(cells) <= 50


def test_most_outputs_are_compared(cells):
    ignored = [c for c in cells if notebooks.IGNORED in notebooks.tags(c)]
    assert len(ignored) <= len(cells) / 4
    tags = {tag for c in cells for tag in notebooks.tags(c)}
    assert not tags & {"nbval-skip", "raises-exception", "skip-execution"}
    assert not [c.source for c in cells if "NBVAL_" in c.source]
    assert [c for c in cells if c not in ignored and c.outputs], "no output is compared"


def test_outputs_are_stored_clean(cells):
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), "run `make execute`"
    for cell in cells:
        assert not [o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
        text = "".join(str(o) for o in cell.outputs)
        assert not [p for p in ("/home/", "/root/", "/Users/", "/tmp/", "site-packages") if p in text], cell.source


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_file_is_in_normal_form(path):
    """What `make execute` writes: no volatile metadata, one byte order."""
    notebook = notebooks.read(ROOT / path)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    before = (ROOT / path).read_text("utf-8")
    notebooks.normalise(notebook)
    assert notebooks.text(notebook) == before, "run `make execute`"


@pytest.mark.parametrize("arguments", [["check"], ["coverage"], ["source"]])
def test_the_commands_of_the_site_need_no_torch(arguments, tmp_path):
    code = (
        "import sys\nsys.modules['torch'] = None  # an import of it raises\n"
        "from pagedvllm.teach.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    if arguments == ["source"]:
        arguments = ["source", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
