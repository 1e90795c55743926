"""The commands and plain `pytest --nbval`, on a small repository of two chapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mini_book import CHAPTER_1, HEAD, PAGES, TAKE, make, nbval, teach, write

from pagedvllm.teach import notebooks


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    """The small repository with its notebooks executed. Tests copy what they change."""
    root = make(tmp_path_factory.mktemp("book"))
    done = teach(root, "execute")
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def chapter_1(executed):
    """The path of chapter 1's notebook, which is put back afterwards."""
    path = executed / "book/ch01.ipynb"
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (old, text.count(old))
    path.write_text(text.replace(old, new))


def failures(done) -> list[str]:
    return sorted(re.findall(r"^FAILED \S*?([\w.]+::.*?)(?: - .*)?$", done.stdout, re.M))


# ---------------------------------------------------------------- execute


def test_execute_is_byte_stable_and_keeps_measured_outputs(executed, chapter_1):
    before = chapter_1.read_bytes()
    done = teach(executed, "execute", "book/ch01.ipynb")
    assert "unchanged" in done.stdout and chapter_1.read_bytes() == before
    stored = json.loads(before)
    assert [c["execution_count"] for c in stored["cells"]] == [1, 2, 3, 4, 5, 6]
    assert [c["id"] for c in stored["cells"]] == [f"cell-{i}" for i in range(6)]
    assert "rewritten" in teach(executed, "execute", "--remeasure", "book/ch01.ipynb").stdout
    again = json.loads(chapter_1.read_text())
    assert [a["outputs"] == b["outputs"] for a, b in zip(stored["cells"], again["cells"], strict=True)] == [
        True
    ] * 5 + [False]


def test_execute_runs_an_ignored_cell_whose_source_changed(executed, chapter_1):
    edit(chapter_1, '"time.time()"', '"-time.time()"')
    assert teach(executed, "execute", "book/ch01.ipynb").returncode == 0
    assert notebooks.read(chapter_1).cells[5].outputs[0].data["text/plain"].startswith("-")


def test_execute_names_the_cell_that_raises_and_writes_nothing(executed, chapter_1):
    edit(chapter_1, '"Pool(3).take()"', '"Pool(3).nothing()"')
    before = chapter_1.read_bytes()
    done = teach(executed, "execute", "book/ch01.ipynb")
    assert done.returncode == 1 and chapter_1.read_bytes() == before
    assert "not changed. cell 4 (cell-4: Pool(3).nothing()) failed: AttributeError" in done.stdout
    assert list(chapter_1.parent.glob(".*")) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [("import sys\\n\\nprint(sys.prefix)", "shows a path"), ("import sys\\n\\nprint(1, file=sys.stderr)", "to stderr")],
)
def test_execute_publishes_no_path_and_no_warning(executed, chapter_1, source, reason):
    edit(chapter_1, '"Pool(3).take()"', f'"{source}"')
    done = teach(executed, "execute", "book/ch01.ipynb")
    assert done.returncode == 1 and "cell 4" in done.stdout and reason in done.stdout


# ---------------------------------------------------------------- check, sync, coverage


def test_check_sync_coverage(executed, chapter_1):
    done = teach(executed, "check")
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
    before = chapter_1.read_bytes()
    edit(chapter_1, "return -(-n // SIZE)", "return -(-n // SIZE )")
    done = teach(executed, "check")
    assert (
        done.returncode == 1 and "ch01.ipynb, cell 1 (cell-1, kv.pool:pages): differs from the package" in done.stdout
    )
    done = teach(executed, "sync")
    assert done.returncode == 0 and "rewritten" in done.stdout and chapter_1.read_bytes() == before
    assert re.search(r"pagedvllm.kv.pool +5 of +9 lines +56%  ch01", teach(executed, "coverage").stdout)


def test_check_says_what_core_lacks(executed, chapter_1):
    write(chapter_1, [HEAD, PAGES])
    done = teach(executed, "check")
    assert done.returncode == 1 and "core kv.pool:Pool.take: no live cell shows it" in done.stdout


def test_check_of_live_cells_that_are_none(executed, chapter_1):
    write(
        chapter_1,
        [HEAD, PAGES, TAKE, TAKE + "\nprint(1)", TAKE.replace("take", "gone"), TAKE.replace("Pool", "Puddle")],
    )
    done = teach(executed, "check")
    assert done.returncode == 1
    for reason in (
        "cell 3 (cell-3): a live cell holds live definitions only",
        "cell 4 (cell-4, kv.pool:Pool.gone): pagedvllm.kv.pool:Pool has no gone",
        "cell 5 (cell-5, kv.pool:Puddle.take): pagedvllm.kv.pool has no class Puddle",
    ):
        assert reason in done.stdout


def test_a_cell_that_shows_an_edit(executed, chapter_1):
    write(chapter_1, [HEAD, PAGES, TAKE, (TAKE.replace("1", "2"), ["edited"])])
    assert teach(executed, "check").returncode == 0
    write(chapter_1, [HEAD, PAGES, TAKE, (TAKE, ["edited"])])
    assert "tagged 'edited', but equal to the package" in teach(executed, "check").stdout


def test_check_of_the_package(executed):
    pool, init = executed / "src/pagedvllm/kv/pool.py", executed / "src/pagedvllm/kv/__init__.py"
    before = pool.read_text(), init.read_text()
    long = "\n".join(f"    n += {i}" for i in range(40)) + "  #" + " wide" * 20
    pool.write_text(
        before[0].replace("def pages", "# above\ndef pages").replace("    return -(-n", long + "\n    return -(-n")
    )
    init.write_text(before[1] + "import os\n")
    try:
        done = teach(executed, "check")
    finally:
        pool.write_text(before[0])
        init.write_text(before[1])
    assert "a comment stands above it" in done.stdout and "43 lines, at most 38" in done.stdout
    assert "is wider than 92 columns" in done.stdout
    assert "kv/__init__.py: must be a docstring" in done.stdout and done.returncode == 1


# ---------------------------------------------------------------- nbval


def test_plain_nbval_passes_alone_and_with_two_workers(executed):
    for options in ((), ("-n", "2", "--dist", "loadfile")):
        done = nbval(executed, "book", "labs", *options)
        assert done.returncode == 0 and "13 passed" in done.stdout, done.stdout + done.stderr


def test_nbval_is_strict_on_the_cpu_and_lax_on_cuda(executed, chapter_1):
    edit(chapter_1, '"3\\n"', '"4\\n"')
    assert failures(nbval(executed, "book")) == ["ch01.ipynb::Cell 3"]
    done = nbval(executed, "book", PAGEDVLLM_DEVICE="cuda:0")
    assert done.returncode == 0 and "10 passed" in done.stdout


def test_a_chapter_sees_no_later_module(executed, chapter_1):
    write(chapter_1, [*CHAPTER_1, "import pagedvllm.later"])
    done = nbval(executed, "book")
    assert failures(done) == ["ch01.ipynb::Cell 6"] and "No module named 'pagedvllm.later'" in done.stdout


def test_a_module_from_outside_is_found_out(executed, chapter_1):
    leak = f"import pagedvllm\n\npagedvllm.__path__.append({str(executed / 'src/pagedvllm')!r})\nimport pagedvllm.later"
    write(chapter_1, [*CHAPTER_1, leak])
    done = nbval(executed, "book")
    assert failures(done) == ["ch01.ipynb::package"] and "from outside the chapter's package" in done.stdout


# ---------------------------------------------------------------- alter


def test_alter_fails_in_exactly_the_altered_cells(executed):
    done = teach(executed, "alter")
    assert done.returncode == 0, done.stdout
    assert "13 cells and checks ran, 3 altered, 3 failed: as it must be" in done.stdout


def test_alter_notices_a_live_cell_that_was_not_installed(executed, chapter_1):
    write(chapter_1, [*CHAPTER_1, "teach.live._history.clear()"])
    assert teach(executed, "execute", "book/ch01.ipynb").returncode == 0
    done = teach(executed, "alter", "book/ch01.ipynb")
    assert done.returncode == 1 and "nothing was altered there: _build.alter.book.ch01.ipynb package" in done.stdout


def test_alter_notices_an_output_that_nobody_compares(executed, chapter_1):
    write(chapter_1, [HEAD, PAGES, TAKE, "# NBVAL_IGNORE_OUTPUT\nprint(1)"])
    assert teach(executed, "execute", "book/ch01.ipynb").returncode == 0
    done = teach(executed, "alter", "book/ch01.ipynb")
    assert done.returncode == 1 and "passed, although its output was altered" in done.stdout
