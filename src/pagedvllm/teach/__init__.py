"""The book's helpers. The engine never imports this package; names are loaded when they are first asked for."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.live import edits, extends, load_ipython_extension, restore

if TYPE_CHECKING:
    from pagedvllm.teach.goldens import differences as differences
    from pagedvllm.teach.goldens import golden as golden
    from pagedvllm.teach.helpers import margin_ok as margin_ok
    from pagedvllm.teach.helpers import setup as setup
    from pagedvllm.teach.helpers import show_error as show_error
    from pagedvllm.teach.labs import grade as grade
    from pagedvllm.teach.labs import score as score
    from pagedvllm.teach.memory_calculator import calculator as calculator
    from pagedvllm.teach.memory_plan import plan as plan
    from pagedvllm.teach.roadmap import chapter as chapter
    from pagedvllm.teach.source_map_page import anchors as anchors
    from pagedvllm.teach.style import bars as bars
    from pagedvllm.teach.style import figure as figure
    from pagedvllm.teach.style import lines as lines
    from pagedvllm.teach.style import show as show
    from pagedvllm.teach.trace_player import player as player

_HOMES = {
    "anchors": "source_map_page",
    "calculator": "memory_calculator",
    "chapter": "roadmap",
    "differences": "goldens",
    "golden": "goldens",
    "grade": "labs",
    "score": "labs",
    "margin_ok": "helpers",
    "plan": "memory_plan",
    "player": "trace_player",
    "setup": "helpers",
    "show_error": "helpers",
    "bars": "style",
    "figure": "style",
    "lines": "style",
    "show": "style",
}
__all__ = ["LiveError", "edits", "extends", "restore", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedvllm.teach' has no attribute {name!r}")
    return getattr(import_module(f"pagedvllm.teach.{_HOMES[name]}"), name)


def _attach() -> None:
    """In IPython, live cells work from the import on, and tqdm does not ask for ipywidgets."""
    warnings.filterwarnings("ignore", message="IProgress not found")
    if "IPython" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None:
            load_ipython_extension(shell)


_attach()
