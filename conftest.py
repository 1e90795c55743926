"""Plain `pytest --nbval` does the right thing: strict on the CPU, lax on CUDA, each notebook on its chapter's package.

Without --nbval nothing here acts: the unit tests see the full package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from pagedvllm.teach import cells, notebooks, roadmap, truncate  # noqa: E402
from pagedvllm.teach.alter import COPIES  # noqa: E402
from pagedvllm.teach.execute import TIMEOUT, kernel_environment  # noqa: E402

CHAPTERS = roadmap.notebooks(ROOT)


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not _notebooks_run(config):
        return
    if os.environ.get("PAGEDVLLM_DEVICE", "cpu").startswith("cuda"):
        option.nbval_lax = True  # everything runs; only cells tagged nbval-check-output are compared
    option.nbval_current_env = True
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(ROOT / "nbval.cfg")
    if option.nbval_cell_timeout == 2000:  # nbval's own, and a dead kernel waits it out
        option.nbval_cell_timeout = float(TIMEOUT)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # once, before any kernel starts: no cell waits for a download
        _prepare_model(config)


def _prepare_model(config: pytest.Config) -> None:
    """Fetch and convert the model when it is not in the cache, with its progress on the screen."""
    command = [sys.executable, "-c", "from pagedvllm.hub import resolve_model; resolve_model(None)"]
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        done = subprocess.run(command, env={**os.environ, **kernel_environment()})
    if done.returncode:
        raise pytest.UsageError("the notebooks' model could not be prepared: see above")


def _notebooks_run(config: pytest.Config) -> bool:
    return bool(config.getoption("nbval", False) or config.getoption("nbval_lax", False))


def _notebook_of(path: Path) -> str:
    """Relative to the repository; a copy with an altered output stands for the notebook that it copies."""
    base = COPIES if path.is_relative_to(COPIES) else ROOT
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else ""


# ---------------------------------------------------------------- the kernel starts with its notebook's first cell


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    file: Any = item.parent
    if not _is_cell(item) or file.kernel is not None:
        return (yield)
    chapter = CHAPTERS.get(_notebook_of(item.path))
    source = ROOT / "src"
    if chapter is not None:
        folder = item.config._tmp_path_factory.mktemp(f"chapter-{chapter.id}-")  # type: ignore[attr-defined]
        source = truncate.write(chapter.id, folder, ROOT)
    file.package_source = source
    environment = kernel_environment(source)
    if "PYTEST_XDIST_WORKER" in os.environ:  # two kernels with two threads each are 15 times slower (measured)
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with _environment(environment):
        return (yield)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For the kernel that starts now, and for nobody after it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _is_cell(item: pytest.Item) -> bool:
    return type(item).__name__ in ("IPyNbCell", "PackageCheck")


# ---------------------------------------------------------------- after its last cell


class PackageCheck(pytest.Item):
    """All of the package that the notebook loaded came from its chapter's copy; with PAGEDVLLM_LIVE=always, all live
    cells were installed."""

    parent: Any

    def runtest(self) -> None:
        source = str(self.parent.package_source)
        loaded = "[(n, getattr(m, '__file__', None)) for n, m in list(sys.modules.items())]"
        modules = {n: file for n, file in self.ask(loaded) if n.split(".")[0] == "pagedvllm"}
        assert "pagedvllm.teach" in modules, "the notebook does not import the package"
        outside = {n: f for n, f in modules.items() if f is None or not f.startswith(source + os.sep)}
        assert not outside, f"modules from outside the chapter's package: {outside}"
        if os.environ.get("PAGEDVLLM_LIVE") == "always":
            installed = self.ask("sys.modules['pagedvllm.teach.live'].history()")
            missing = live_definitions(self.parent.nb) - set(installed)
            assert not missing, f"live cells that were not installed: {sorted(missing)}"

    def ask(self, expression: str) -> Any:
        """The value of an expression in the notebook's kernel."""
        client = self.parent.kernel.kc
        question = f"__import__('json').dumps((lambda sys: {expression})(__import__('sys')))"
        message = client.execute("", silent=True, user_expressions={"answer": question})
        while True:
            try:
                reply = client.get_shell_msg(timeout=60)
            except Empty:
                pytest.fail("the notebook's kernel does not answer")
            if reply["parent_header"].get("msg_id") == message:
                answer = reply["content"]["user_expressions"]["answer"]
                assert answer["status"] == "ok", answer
                return json.loads(eval(answer["data"]["text/plain"], {"__builtins__": {}}))

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.name}::package"


def live_definitions(notebook: Any) -> set[str]:
    """The labels of all live definitions of a notebook, as `pagedvllm.teach.live.history` has them."""
    found = set()
    for cell in notebooks.code_cells(notebook):
        for statement in cells.live_statements(cell.source):
            mark = "." if ":" in statement.home else ":"
            found |= {f"{statement.home}{mark}{cells.pieces.key(s)}" for s in statement.body}
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _notebooks_run(config):
        return
    last = {item.parent: i for i, item in enumerate(items) if _is_cell(item)}
    for file, i in sorted(last.items(), key=lambda entry: -entry[1]):
        if _notebook_of(file.path) in CHAPTERS:
            items.insert(i + 1, PackageCheck.from_parent(file, name="package"))
