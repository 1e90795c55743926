"""The toy package, and a shell whose cells edit it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

import pytest
from IPython.core.interactiveshell import InteractiveShell

from pagedvllm.teach import labs, live

live.ROOTS.update({"pagedvllm_toy", "pagedvllm_newer"})
TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="session", autouse=True)
def toy() -> Path:
    if str(TOY) not in sys.path:
        sys.path.insert(0, str(TOY))
    return TOY


@pytest.fixture(autouse=True)
def all_failures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of one lab's grader read what every case says."""
    if request.module.__name__.rpartition(".")[2].startswith("test_lab0"):
        monkeypatch.setattr(labs, "PRINTED", 99)


@pytest.fixture
def cell(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Run a cell in a real IPython shell, as a kernel would. `cell.ns` is the notebook's namespace."""
    monkeypatch.delenv("PAGEDVLLM_LIVE", raising=False)
    shell = InteractiveShell.instance()
    shell.reset(new_session=True)
    shell.colors = "nocolor"
    shell.ast_transformers[:] = [live.CellTransformer(shell.user_ns)]
    shell.user_module.__spec__ = None  # as in a kernel: a spawned process asks for it
    live.processes.watch()
    shell.user_ns["extends"] = live.extends

    def run(source: str) -> Any:
        result = shell.run_cell(textwrap.dedent(source).strip("\n"))
        result.raise_error()
        return result.result

    run.ns = shell.user_ns  # type: ignore[attr-defined]
    yield run
    live.restore()
    assert not live._surgery and not live.edits()
