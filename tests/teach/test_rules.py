"""What a live cell may hold, old and new cells, engine processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from pagedvllm.teach import LiveError, live, restore
from pagedvllm.teach.processes import alive

METHOD = '@extends("pagedvllm_toy.kv:BlockPool")\ndef secret(self) -> int:\n    return 5\n'
EDIT = """
@extends("pagedvllm_toy.kv:BlockPool")
def allocate(self, n: int, grow: int = grow) -> list[Block]:
    return [self.free_queue.pop().take() for _ in range(n)]
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\n" + METHOD, "move `import os`"),
        (METHOD + "print(1)", r"move `print\(1\)`"),
        (METHOD + "x = 2", "move `x = 2`"),
        ("def plain(): ...\n" + METHOD, r"move `def plain\(\):`"),
        ('@staticmethod\n@extends("pagedvllm_toy.kv:BlockPool")\ndef f(): ...', "the first decorator"),
        ('if True:\n    @extends("pagedvllm_toy.kv")\n    def f(): ...', "at the top level"),
        ('class Mine:\n    @extends("pagedvllm_toy.kv")\n    def f(self): ...', "at the top level"),
        ('extends("pagedvllm_toy.kv")', "the first decorator"),
        ('home = "pagedvllm_toy.kv"\nextends(home)', "move `home|first decorator"),
        ("@extends(home)\ndef f(): ...", "one string"),
        ('@extends("no spaces here")\ndef f(): ...', "one string"),
        ('@extends("pagedvllm_toy.kv", 1)\ndef f(): ...', "one string"),
        ('@extends("pagedvllm_toy.kv")\n@extends("pagedvllm_toy.kv")\ndef f(): ...', "one `extends`"),
        ('with extends("pagedvllm_toy.kv") as kv:\n    NULL_BLOCK = 1', "has no `as`"),
        ('with extends("pagedvllm_toy.kv:BlockPool"):\n    grow = 2', "constants of a module"),
        ('with extends("pagedvllm_toy.kv"):\n    a, b = 1, 2', "constants only"),
        ('with extends("pagedvllm_toy.kv"):\n    print(1)', "constants only"),
        ('%%time\n@extends("pagedvllm_toy.kv:BlockPool")\ndef secret(self): ...', "no magic above"),
        ('@extends("pagedvllm_toy.nothing")\ndef f(): ...', "no module 'pagedvllm_toy.nothing'"),
        ('@extends("pagedvllm_toy.kv:Nothing")\ndef f(self): ...', "no class Nothing"),
    ],
)
def test_what_is_no_live_cell_says_why(cell, source, reason):
    from pagedvllm_toy.kv import BlockPool

    code = BlockPool.secret.__code__
    with pytest.raises(LiveError, match=reason):
        cell(source)
    assert not live.edits() and BlockPool.secret.__code__ is code
    assert cell("1 + 1") == 2  # the transformer is still there
    assert InteractiveShell.instance().ast_transformers


def test_import_and_live_cell_are_kept_apart(cell):
    cell.ns.pop("extends")
    with pytest.raises(LiveError, match="in a later cell"):
        cell("from pagedvllm.teach import extends\n" + METHOD)


def test_another_name_for_extends(cell):
    from pagedvllm_toy.kv import BlockPool

    cell.ns["shows"] = cell.ns.pop("extends")
    with pytest.raises(LiveError, match="no import, no use"):
        cell("import os\n" + METHOD.replace("extends", "shows"))
    assert BlockPool(3).secret() == 7


def test_an_unrelated_name_is_left_alone(cell):
    cell.ns["extends"] = lambda home: lambda f: home
    assert cell('@extends("x")\ndef f(): ...\nf') == "x"


def test_old_cell_over_newer_code_and_newer_code_in_the_file(cell, tmp_path, monkeypatch, capsys):
    """A module is edited in its file while the kernel runs: an old cell says so, the new text takes effect."""
    file = tmp_path / "pagedvllm_newer.py"
    old = "def f() -> int:\n    return 1\n"
    file.write_text(old)
    monkeypatch.syspath_prepend(tmp_path)
    import pagedvllm_newer as newer

    head = '@extends("pagedvllm_newer")\n'
    cell(head + old)
    assert not live.edits() and capsys.readouterr().out == ""
    file.write_text(old.replace("1", "2"))
    cell(head + old)
    assert "has other, newer code" in capsys.readouterr().out and newer.f() == 1
    cell(head + old.replace("1", "2"))
    assert "is reloaded" in capsys.readouterr().out and newer.f() == 2
    restore()
    monkeypatch.delitem(sys.modules, "pagedvllm_newer")


def test_spawned_process_sees_edits(cell, monkeypatch):
    from pagedvllm_toy.worker import start

    monkeypatch.setenv("PAGEDVLLM_PLUGINS", "")
    assert start()[1] == [1, 2]
    cell(EDIT)
    assert os.environ["PAGEDVLLM_PLUGINS"] == "pagedvllm.teach.live"
    assert start()[1] == [63, 62]
    restore()
    assert "PAGEDVLLM_LIVE_EDITS" not in os.environ
    assert start()[1] == [1, 2]


def test_other_plugins_stay(cell, monkeypatch):
    monkeypatch.setenv("PAGEDVLLM_PLUGINS", "mine")
    cell(EDIT)
    assert os.environ["PAGEDVLLM_PLUGINS"] == "mine,pagedvllm.teach.live"
    restore()
    assert os.environ["PAGEDVLLM_PLUGINS"] == "mine"


def test_no_edit_while_an_engine_process_runs(cell):
    from pagedvllm_toy.kv import BlockPool
    from pagedvllm_toy.worker import start

    process, _ = start(wait=60)
    try:
        code = BlockPool.allocate.__code__
        assert alive() == [f"toy engine (pid {process.pid})"]
        with pytest.raises(LiveError, match=rf"toy engine \(pid {process.pid}\) started before this edit"):
            cell(EDIT)
        assert BlockPool.allocate.__code__ is code and not live.edits()
    finally:
        process.kill()
        process.join()
    assert alive() == []
    cell(EDIT)
    assert BlockPool.allocate.__code__ is not code


def test_no_restore_while_an_engine_process_runs(cell):
    from pagedvllm_toy.worker import start

    cell(EDIT)
    process, answer = start(wait=60)
    try:
        assert answer == [63, 62]
        with pytest.raises(LiveError, match="toy engine"):
            restore()
        assert live.edits()
    finally:
        process.kill()
        process.join()


def test_a_cell_equal_to_the_package_needs_no_shutdown(cell, monkeypatch):
    from pagedvllm_toy.worker import start

    monkeypatch.setenv("PAGEDVLLM_LIVE", "always")
    process, _ = start(wait=60)
    try:
        cell('@extends("pagedvllm_toy.kv:Manager")\ndef lookup(self, tokens: list[int]) -> int:\n    return 0')
        assert live.edits() == ["pagedvllm_toy.kv:Manager.lookup"]
    finally:
        process.kill()
        process.join()


def test_importing_teach_loads_no_torch_and_no_engine():
    code = "import sys, pagedvllm.teach; print(sorted(m for m in sys.modules if m.startswith(('torch', 'pagedvllm'))))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "torch" not in out and "pagedvllm.llm" not in out and "pagedvllm.teach.live" in out
