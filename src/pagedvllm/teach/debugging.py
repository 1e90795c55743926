"""A debugger session written down: where to stop, what to type; the transcript is the same on every machine."""

from __future__ import annotations

import io
import linecache
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def session(stop_in: Callable[..., Any], commands: Sequence[str], when: str | None = None) -> Iterator[None]:
    """Stop at the first line of `stop_in`, once, and type `commands` into pdb.

    Equal to `breakpoint()` in that line and a person at the keyboard, except that places are shown without line
    numbers and paths. `when`: a condition, as in pdb's `break`. The last command should let it run on ("continue").
    """
    debugger = _Scripted(commands)
    code = stop_in.__code__
    lines = sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno})
    body = next(line for line in lines if _is_statement(code.co_filename, line))
    error = debugger.set_break(code.co_filename, body, temporary=True, cond=when, funcname=code.co_name)
    if error:
        raise ValueError(error)
    before = sys.gettrace()
    debugger.reset()
    debugger.botframe = sys._getframe()  # where the session began: it never steps out of it
    debugger._set_stopinfo(debugger.botframe, None, -1)  # type: ignore[attr-defined]
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(before)
        debugger.clear_all_breaks()
        print(debugger.transcript.getvalue(), end="")


def _is_statement(file: str, line: int) -> bool:
    return not linecache.getline(file, line).lstrip().startswith(('"""', "def ", "@"))


class _Scripted(pdb.Pdb):
    """pdb with a script for a keyboard, which shows modules and functions instead of paths and line numbers."""

    def __init__(self, commands: Sequence[str]) -> None:
        self.transcript = io.StringIO()
        keyboard = io.StringIO("\n".join(commands) + "\n")
        super().__init__(stdin=keyboard, stdout=self.transcript, nosigint=True, readrc=False)
        self.use_rawinput, self.prompt = False, "(Pdb) "  # in IPython, pdb.Pdb has another one

    def message(self, msg: str, *rest: Any) -> None:
        if not msg.startswith("Deleted "):  # of the one breakpoint, with its path
            super().message(msg, *rest)

    def precmd(self, line: str) -> str:
        print(line, file=self.transcript)  # as if it had been typed
        return str(super().precmd(line))

    def print_stack_entry(self, frame_lineno: tuple[FrameType, int], *_: Any, **__: Any) -> None:
        frame, line = frame_lineno
        self.message(f"> {_place(frame)}\n-> {_source(frame, line)}")

    def print_stack_trace(self, *_: Any) -> None:
        """`where`: the engine's own frames."""
        for frame, line in self.stack:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("pagedvllm.") and not module.startswith("pagedvllm.teach"):
                mark = ">" if frame is self.curframe else " "
                self.message(f"{mark} {_place(frame):<36}{_source(frame, line)}")


def _source(frame: FrameType, line: int) -> str:
    return linecache.getline(frame.f_code.co_filename, line).strip()


def _place(frame: FrameType) -> str:
    """`sched/scheduler.py schedule()`: by its module, since a live cell's code has the cell's file name."""
    module: str = frame.f_globals.get("__name__", "?")
    return f"{module.removeprefix('pagedvllm.').replace('.', '/')}.py {frame.f_code.co_name}()"
