"""Triton puzzles: kernels that a reader writes, run on the CPU in Triton's interpreter (labs 7.1 to 7.3).

from pagedvllm.teach.puzzles import tl, triton  # Triton with its interpreter, or a stand-in
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any


def available() -> bool:
    """Is there Triton? Without it a kernel can be written and not run."""
    return find_spec("triton") is not None


def load() -> tuple[Any, Any]:
    """(triton, triton.language), with kernels that run in the interpreter: Triton chooses it while it is imported.

    Without Triton (macOS): stand-ins.

    Raises:
        RuntimeError: Triton was imported before, without its interpreter.
    """
    if not available():
        return SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=int)
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported without its interpreter: restart the notebook and run this cell first")
    os.environ["TRITON_INTERPRET"] = "1"
    return import_module("triton"), import_module("triton.language")


def __getattr__(name: str) -> Any:
    """`triton` and `tl`, loaded when they are first asked for."""
    if name not in ("triton", "tl"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load()[("triton", "tl").index(name)]


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel. An untouched one raises NotImplementedError, as other stubs do."""
    try:
        kernel[grid](*args, **constants)
    except Exception as error:
        if isinstance(error.__cause__, NotImplementedError):  # the interpreter wraps what a kernel raises
            raise error.__cause__ from None
        raise
