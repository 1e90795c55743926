"""Grading; and for every task of every lab: the stub fails, the solution passes."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path

import pytest

from pagedvllm.teach import labs, notebooks, roadmap
from pagedvllm.teach.labs import Case, Task, grade, same, score

ROOT = Path(__file__).resolve().parents[2]


def above(got, n):
    return "" if got > n else f"{got} is not above {n}"


@pytest.fixture(autouse=True)
def lab(monkeypatch):
    """A lab of its own, chapter 98's."""
    tasks = {
        "98.1": Task("Add", [Case((1, 2), 3, "small"), Case((0.1, 0.2), 0.3, "not exact"), Case(([1], [2]), [1, 2])]),
        "98.2": Task("A value", [Case(expected={"a": [1, 2.0]})]),
        "98.3": Task("A check", lambda: [Case(lambda: (4,), check=above)]),
    }
    monkeypatch.setattr(labs, "import_module", lambda name: types.SimpleNamespace(TASKS=tasks))
    monkeypatch.setattr(labs, "_grades", {})


def test_passed_and_failed(capsys):
    assert grade("98.1", lambda a, b: a + b).passed
    assert capsys.readouterr().out == "98.1 Add: passed, 3 of 3 cases\n"
    result = grade("98.1", lambda a, b: 3)
    assert not result.passed and result.attempted and len(result.failures) == 2
    assert capsys.readouterr().out == (
        "98.1 Add: not passed, 1 of 3 cases\n"
        "  not exact: input (0.1, 0.2), expected 0.3, got 3\n"
        "  case: input ([1], [2]), expected [1, 2], got 3\n"
    )


def stub(a, b):
    raise NotImplementedError


def bare(a, b):
    """Only a docstring."""
    ...


@pytest.mark.parametrize("answer", [stub, bare, lambda a, b: None, lambda a, b: ..., None, ...])
def test_not_attempted_is_not_passed(capsys, answer):
    result = grade("98.1", answer)
    assert not result.passed and not result.attempted
    assert capsys.readouterr().out == "98.1 Add: not attempted\n"


def test_a_forgotten_return_is_an_attempt(capsys):
    def forgets(a, b):
        total = a + b  # noqa: F841

    result = grade("98.1", forgets)
    assert result.attempted and not result.passed and len(result.failures) == 3
    assert capsys.readouterr().out == (
        "98.1 Add: not passed, 0 of 3 cases\n"
        "  small: input (1, 2), returned None: did you forget `return`?\n"
        "  not exact: input (0.1, 0.2), returned None: did you forget `return`?\n"
        "  and 1 more\n"
    )


def test_at_most_two_failures_are_printed(capsys):
    assert len(grade("98.1", lambda a, b: 0).failures) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == "  and 1 more"


def test_arguments_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"task is a string such as '1\.2', not 1\.3"):
        grade(1.3, stub)
    with pytest.raises(TypeError, match=r"answer is a function that grade\(\) calls .*, not 5"):
        grade("98.1", 5)
    with pytest.raises(TypeError, match="answer is a function"):
        grade("98.3", 5)


def test_errors_of_the_answer_are_outcomes(capsys):
    assert not grade("98.1", lambda a, b: 1 / 0).passed
    assert "small: input (1, 2), raised ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_what_the_check_cannot_read_is_an_outcome(capsys):
    assert not grade("98.3", lambda n: "five").passed
    assert "case: input (4), cannot be checked, TypeError: '>' not" in (said := capsys.readouterr().out)
    assert said.endswith("got 'five'\n")


def test_the_answer_cannot_spoil_the_cases():
    def spoil(a, b):
        if isinstance(a, list):
            a.extend(b)
            return a
        return a + b

    assert grade("98.1", spoil).passed and grade("98.1", spoil).passed


def test_values_checks_and_score(capsys):
    assert grade("98.2", {"a": [1, 2.000001]}).passed
    assert not grade("98.3", lambda n: n).passed
    assert "4 is not above 4" in capsys.readouterr().out
    assert grade("98.3", lambda n: n + 1, solution=True).passed
    assert "(the book's solution): passed" in capsys.readouterr().out
    score("98")
    assert capsys.readouterr().out == (
        "1 of 3 tasks passed\n  98.1 Add: not attempted\n  98.2 A value: passed, 1 of 1 cases\n"
        "  98.3 A check: not passed, 0 of 1 cases\n"
    )


def test_same():
    import torch

    assert same(torch.tensor([1.0, 2.0]), [1, 2]) and same((1, 2), [1, 2]) and same(True, True)
    assert not same(1, True) and not same([1], [1, 2]) and not same("a", 1) and not same({"a": 1}, {"b": 1})
    assert same(float("inf"), float("inf")) and not same(1.001, 1.0)


def test_a_task_that_is_not_there(monkeypatch):
    with pytest.raises(ValueError, match=r"no task '98\.9'; this lab has 98\.1"):
        grade("98.9", None)
    with pytest.raises(ValueError, match="names no lab"):
        grade("x", None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="chapter 97 has no lab"):
        grade("97.1", None)


# ---------------------------------------------------------------- the labs of the book


def tasks_of_labs() -> list[tuple[str, str]]:
    return [
        (chapter.lab, tag.removeprefix("task:"))
        for chapter in roadmap.read(ROOT)
        if chapter.lab
        for cell in notebooks.code_cells(notebooks.read(ROOT / chapter.lab))
        for tag in notebooks.tags(cell)
        if tag.startswith("task:")
    ]


def imports_before(cells, stop):
    """The import statements of the cells above a task."""
    lines = ["from pagedvllm import teach"]  # the first cell's
    for cell in cells[:stop]:
        if cell.source != notebooks.FIRST_CELL:
            tree = ast.parse(re.sub(r"^[%!].*", "", cell.source, flags=re.M))
            lines += [ast.unparse(s) for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    return "\n".join(lines)


@pytest.mark.parametrize(("notebook", "task"), tasks_of_labs())
def test_the_stub_fails_and_the_solution_passes(monkeypatch, capsys, notebook, task):
    """A task needs its cells and the imports above it, nothing else of the notebook."""
    monkeypatch.undo()
    cells = notebooks.code_cells(notebooks.read(ROOT / notebook))
    where = {tag: i for i, cell in enumerate(cells) for tag in notebooks.tags(cell)}
    stub_at, solution_at = where[f"task:{task}"], where[f"solution:{task}"]

    def graded(start):
        """The first cell from there on that grades the task."""
        return next(c.source for c in cells[start:] if f'grade("{task}"' in c.source)

    names: dict = {}
    exec(imports_before(cells, stub_at), names)
    exec(cells[stub_at].source, names)
    exec(graded(stub_at), names)
    assert not labs._last[task].passed and not labs._last[task].attempted
    assert labs._last[task] is labs._grades[task]
    exec(cells[solution_at].source, names)
    check = graded(solution_at)
    assert "solution=True" in check and ".passed" in check and "assert" in check
    exec(check, names)
    assert labs._last[task].passed and labs._last[task].total > 1


def test_every_lab_has_tasks_and_every_task_cases():
    for chapter in roadmap.read(ROOT):
        if chapter.lab:
            shown = {task for notebook, task in tasks_of_labs() if notebook == chapter.lab}
            assert 1 <= len(shown) <= 3
