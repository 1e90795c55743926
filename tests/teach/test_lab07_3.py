"""Lab 7.3's grader: right answers pass; the mistakes people make fail with words that help."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from pagedvllm.teach.cases.lab07_3 import EVENING, PADDING, least_waste, wasted_rows
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


def stub(*args: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("task", ["7.3.1", "7.3.2", "7.3.3"])
def test_a_stub_is_not_attempted(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome(task, stub, capsys)
    assert not passed and "not attempted" in said


# ---------------------------------------------------------------- 7.3.1


def fit(sizes: list[int], requests: int) -> tuple[int, int] | None:
    size = min((size for size in sizes if size >= requests), default=None)
    return None if size is None else (size, size - requests)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda s, n: next(((x, x - n) for x in s if x >= n), None), "sizes in any order: input ([8, 1, 4], 2)"),
        (
            lambda s, n: min((x, x - n) for x in s if x > n),
            "a size of its own: input ([1, 2, 4, 8], 4), expected (4, 0)",
        ),
        (lambda s, n: fit(s, n) or (n, 0), "more than were recorded: input ([1, 2, 4, 8], 9), expected None"),
    ],
)
def test_wrong_fits_fail(answer: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("7.3.1", fit, capsys)[0]
    passed, said = outcome("7.3.1", answer, capsys)
    assert not passed and words in said


# ---------------------------------------------------------------- 7.3.2


class Fill:
    """A right solution, with switches that spoil it."""

    rebinds = keeps_padding = pads_all_with_zero = pads_everything = False
    forgets = ""

    def __call__(self, buffers: Any, step: Any, size: int) -> Any:
        count, width = step["tables"].shape
        for name in buffers:
            if name == self.forgets:
                continue
            if self.rebinds:
                buffers[name] = buffers[name].clone()
            row = (slice(count), slice(width)) if name == "tables" else slice(count)
            buffers[name][row] = step[name]
            if not self.keeps_padding:
                buffers[name][count:size] = 0 if self.pads_all_with_zero else PADDING[name]
        return buffers


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"rebinds": True}, "another tensor took the buffer's place"),
        ({"keeps_padding": True}, "rows 5 to 7 of token_ids are [905, 906, 907], not 0"),
        ({"pads_all_with_zero": True}, "rows 5 to 7 of slots are [0, 0, 0], not -1"),
        ({"forgets": "slots"}, "the graph read slots [800, 801"),
        ({"forgets": "tables"}, "the graph read tables"),
    ],
)
def test_wrong_buffers_fail(mistake: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("7.3.2", Fill(), capsys)[0]
    passed, said = outcome("7.3.2", type("Wrong", (Fill,), mistake)(), capsys)
    assert not passed and words in said


# ---------------------------------------------------------------- 7.3.3


def choose(steps: dict[int, int], graphs: int) -> list[int]:
    *smaller, largest = sorted(steps)
    some = min(graphs - 1, len(smaller))
    found = ([*sizes, largest] for sizes in combinations(smaller, some))
    return min(found, key=lambda sizes: wasted_rows(sizes, steps))


def most_frequent(steps: dict[int, int], graphs: int) -> list[int]:
    others = sorted(set(steps) - {max(steps)}, key=lambda n: -steps[n])
    return [*others[: graphs - 1], max(steps)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (most_frequent, "wastes"),
        (lambda steps, graphs: sorted(steps), "graphs are allowed"),
        (lambda steps, graphs: sorted(steps)[:graphs], "no size for a step of 7 requests"),
        (lambda steps, graphs: max(steps), "expected a list of sizes, got 7"),
    ],
)
def test_wrong_sizes_fail(answer: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("7.3.3", choose, capsys)[0]
    passed, said = outcome("7.3.3", answer, capsys)
    assert not passed and words in said


@pytest.mark.parametrize("graphs", range(1, 8))
def test_the_oracle_agrees_with_trying_everything(graphs: int) -> None:
    assert least_waste(EVENING, graphs) == wasted_rows(choose(EVENING, graphs), EVENING)
