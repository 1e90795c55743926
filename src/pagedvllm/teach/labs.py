"""Grading the tasks of the labs. The cases live in cases/labNN.py, one file a lab; this module imports no torch.

# cases/lab01.py
TASKS = {
    "1.2": Task("KV bytes of a model", [Case((30, 3, 64, 2), 23040, "the embedded model, fp16")]),
}
"""

from __future__ import annotations

import copy
import dis
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Arguments = tuple[Any, ...]
PRINTED = 2  # failing cases that are shown


@dataclass(frozen=True)
class Case:
    """One input of a task, and what must come out.

    Args:
        args: the arguments; the answer gets copies. Or a function that makes them, for what is large.
        expected: the value.
        note: which case this is, for the reader.
        check: instead of `expected`: a function of the result and the arguments that says what is wrong, "" if nothing.
    """

    args: Arguments | Callable[[], Arguments] = ()
    expected: Any = None
    note: str = ""
    check: Callable[..., str] | None = None


@dataclass(frozen=True)
class Task:
    """A task: what it is called, its cases (or a function that makes them), and how near a number must come."""

    title: str
    cases: Sequence[Case] | Callable[[], Sequence[Case]]
    tolerance: float = 1e-5  # relative, and absolute below 1


@dataclass(frozen=True)
class Grade:
    """The outcome of one `grade(...)`. It has printed itself, so it shows nothing as the last line of a cell."""

    task: str
    attempted: bool
    total: int = 0
    failures: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return self.attempted and not self.failures

    @property
    def summary(self) -> str:
        if not self.attempted:
            return "not attempted"
        if self.passed:
            return f"passed, {self.total} of {self.total} cases"
        return f"not passed, {self.total - len(self.failures)} of {self.total} cases"

    def _ipython_display_(self) -> None: ...


_grades: dict[str, Grade] = {}  # the reader's latest of each task
_last: dict[str, Grade] = {}  # the latest of each task, the solution's included


def grade(task: str, answer: Any, *, solution: bool = False) -> Grade:
    """Run the cases of a task on an answer (a function, or a value) and print what failed.

    Args:
        task: "1.2" is the second task of chapter 1's lab.
        solution: the answer is the book's own: `score` does not count it.

    Raises:
        ValueError: there is no such task.
        TypeError: `task` is no string, or the task wants a function and `answer` is none.
    """
    if not isinstance(task, str):
        raise TypeError(f"task is a string such as '1.2', not {task!r}")
    found = _task(task)
    cases = found.cases() if callable(found.cases) else found.cases
    if not cases:
        raise ValueError(f"task {task} has no cases")
    if any(case.args for case in cases) and not (callable(answer) or answer is None or answer is ...):
        raise TypeError(f"answer is a function that grade() calls (its name, no parentheses), not {_short(answer)}")
    outcome = _run(task, found, cases, answer)
    _last[task] = outcome
    if not solution:
        _grades[task] = outcome
    title = f"{task} {found.title}" + (" (the book's solution)" if solution else "")
    more = len(outcome.failures) - PRINTED
    rest = [f"  and {more} more"] if more > 0 else []
    print("\n".join([f"{title}: {outcome.summary}", *outcome.failures[:PRINTED], *rest]))
    return outcome


def score(lab: str) -> None:
    """Print how the reader's own answers to the tasks of a lab stand ("1": chapter 1's lab)."""
    tasks = _tasks(lab)
    passed = sum(t in _grades and _grades[t].passed for t in tasks)
    rows = [f"  {t} {tasks[t].title}: {_grades[t].summary if t in _grades else 'not attempted'}" for t in tasks]
    print("\n".join([f"{passed} of {len(tasks)} tasks passed", *rows]))


def _task(name: str) -> Task:
    tasks = _tasks(name.rpartition(".")[0])
    if name not in tasks:
        raise ValueError(f"there is no task {name!r}; this lab has {', '.join(tasks)}")
    return tasks[name]


def _tasks(lab: str) -> Mapping[str, Task]:
    """TASKS of cases/lab01.py for "1", of cases/lab07_2.py for "7.2"."""
    chapter, _, part = lab.partition(".")
    if not chapter.isdigit():
        raise ValueError(f"{lab!r} names no lab: write '1.2' for the second task of chapter 1's lab")
    module = f"pagedvllm.teach.cases.lab{int(chapter):02}{'_' + part if part else ''}"
    try:
        tasks: Mapping[str, Task] = import_module(module).TASKS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"chapter {lab} has no lab") from error
    return tasks


# ---------------------------------------------------------------- running the cases


def _run(name: str, task: Task, cases: Sequence[Case], answer: Any) -> Grade:
    if answer is None or answer is ...:
        return Grade(name, attempted=False)
    failures, untouched, forgot = [], 0, []
    for case in cases:
        args = case.args() if callable(case.args) else copy.deepcopy(case.args)
        shown = ", ".join(_short(a) for a in args)
        where = f"  {case.note or 'case'}: " + (f"input ({shown}), " if args else "")
        try:
            got = answer(*args) if callable(answer) else answer
        except NotImplementedError:
            return Grade(name, attempted=False)
        except Exception as error:  # whatever the reader's code raises is an outcome, not the grader's failure
            failures.append(f"{where}raised {type(error).__name__}: {error}")
            continue
        untouched += got is None or got is ...
        if got is None and _has_code(answer):
            forgot.append(f"{where}returned None: did you forget `return`?")
        try:
            reason = _wrong(case, got, args, task.tolerance)
        except Exception as error:  # the check met what it did not expect, and that is no right answer
            reason = f"cannot be checked, {type(error).__name__}: {error}; got {_short(got)}"
        if reason:
            failures.append(where + reason)
    if untouched == len(cases) and not forgot:
        return Grade(name, attempted=False)
    if len(forgot) == len(cases) == len(failures):
        failures = forgot
    return Grade(name, True, len(cases), tuple(failures))


def _has_code(answer: Any) -> bool:
    """Does a function do anything? Not when its body is a docstring, `...`, `pass` or `return None`."""
    while isinstance(answer, functools.partial):
        answer = answer.func
    code = getattr(answer, "__code__", None)
    return code is not None and any(i.opname not in _DOES_NOTHING for i in dis.get_instructions(code))


_DOES_NOTHING = ("RESUME", "NOP", "COPY_FREE_VARS", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE")


def _wrong(case: Case, got: Any, args: Arguments, tolerance: float) -> str:
    if case.check is not None:
        return case.check(got, *args)
    if same(got, case.expected, tolerance):
        return ""
    return f"expected {_short(case.expected)}, got {_short(got)}"


def same(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Equal, numbers within the tolerance; lists, dicts and tensors element by element. A bool is no number here."""
    got, expected = (v.tolist() if hasattr(v, "tolist") else v for v in (got, expected))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same(got[k], v, tolerance) for k, v in expected.items())
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(expected)
            and all(same(a, b, tolerance) for a, b in zip(got, expected, strict=True))
        )
    numbers = [isinstance(v, (int, float)) and not isinstance(v, bool) for v in (got, expected)]
    if all(numbers) and float in (type(got), type(expected)):
        return got == expected or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(got == expected) and isinstance(got, bool) == isinstance(expected, bool)


def _short(value: Any, limit: int = 100) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
