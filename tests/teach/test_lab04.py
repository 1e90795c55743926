"""Lab 4's grader: right answers pass; the mistakes people make fail with words that help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.protocol import InvariantError
from pagedvllm.request import Request
from pagedvllm.teach.cases import lab04
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


# ---------------------------------------------------------------- 4.1


class Allocator:
    """A right solution, with switches that spoil it."""

    partly = head_first = queue = rounds_up = shares = from_zero = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.tables = block_size, dict[str, list[int]]()
        self.free_blocks = list(range(0 if self.from_zero else 1, num_blocks))

    def allocate(self, name: str, num_tokens: int) -> list[int] | None:
        size = num_tokens // self.block_size + 1 if self.rounds_up else -(-num_tokens // self.block_size)
        missing = max(size - len(self.table(name)), 0)
        if missing > len(self.free_blocks) and not self.partly:
            return None
        added, self.free_blocks = self.free_blocks[:missing], self.free_blocks[missing:]
        self.tables.setdefault(name, []).extend(added)
        return added

    def free(self, name: str) -> None:
        table = self.tables.get(name, []) if self.shares else self.tables.pop(name, [])
        freed = table if self.head_first else table[::-1]
        self.free_blocks = self.free_blocks + freed if self.queue else freed + self.free_blocks

    def table(self, name: str) -> list[int]:
        return self.tables.get(name, [])


def test_a_right_allocator_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("4.1", Allocator, capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("partly", "all or nothing: input (5, 4), after allocate('a', 9), allocate('b', 5): expected None, got [4]"),
        ("head_first", "freed tail first, used next"),
        ("queue", "the latest freed is the first used"),
        ("rounds_up", "exactly full: input (8, 4), after allocate('a', 8): expected [1, 2], got [1, 2, 3]"),
        ("shares", "the table of 'a' is"),
        (
            "from_zero",
            "blocks come in order, from 1: input (8, 4), after allocate('a', 9): expected [1, 2, 3], got [0, 1",
        ),
    ],
)
def test_a_wrong_allocator_fails(mistake: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("4.1", type("Wrong", (Allocator,), {mistake: True}), capsys)
    assert not passed and words in said


def test_an_allocator_that_raises_is_an_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    class Raises(Allocator):
        def free(self, name: str) -> None:
            raise KeyError(name)

    passed, said = outcome("4.1", Raises, capsys)
    assert not passed and "after allocate('a', 9), free('a'): raised KeyError: 'a'" in said


# ---------------------------------------------------------------- 4.2


def find_bug(make: Callable[[], KVCacheManager], lengths: range, untils: tuple[int, ...]) -> str:
    for until in untils:
        for length in lengths:
            manager, request = make(), Request("r", [0] * length)
            try:
                if manager.allocate(request, length) is not None:
                    request.num_computed_tokens = length
                manager.check_invariants({"r": request})
                manager.free(request, until)
                manager.check_invariants({})
                manager.step_done(1)
                manager.check_invariants({})
            except (InvariantError, ValueError) as error:
                text = str(error)
                if "wrong count" in text:
                    return "off by one"
                return "leak" if text.startswith("leak") else "double free"
    return "none"


def test_every_planted_bug_is_named_by_the_invariants() -> None:
    for name, bug in zip("ABC", lab04.BUGS, strict=False):
        assert find_bug(lambda name=name: lab04.PLANTED[name](6, 4), range(1, 21), (0, 1)) == bug  # type: ignore[misc]
    assert find_bug(lambda: KVCacheManager(6, 4), range(1, 22), (0, 1)) == "none"


@pytest.mark.parametrize(
    ("lengths", "untils", "missed"),
    [
        (range(4, 5), (0, 1), "manager B: input (make), expected 'off by one', got 'none' (did your calls make it"),
        (range(4, 21, 4), (0, 1), "manager C: input (make), expected 'leak', got 'none'"),
        (range(1, 21), (0,), "manager A: input (make), expected 'double free', got 'none'"),
        (range(1, 21), (0, 1), "a bug that you have not seen, 2: input (make), expected 'double free', got 'none'"),
    ],
)
def test_calls_that_miss_a_bug(
    lengths: range, untils: tuple[int, ...], missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full blocks only, no boundary crossed, no free under a running step, nobody refused while it grows."""
    passed, said = outcome("4.2", lambda make: find_bug(make, lengths, untils), capsys)
    assert not passed and missed in said


def test_a_guess_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("4.2", lambda make: "leak", capsys)
    assert not passed and "found 'leak' where there is no bug" in said
    assert (
        "expected one of double free, off by one, leak, none, got 'bug'" in outcome("4.2", lambda m: "bug", capsys)[1]
    )


# ---------------------------------------------------------------- 4.3

RIGHT = """
1 | a0 a1 a2 a3
2 | a4 a5 a6 a7
3 | c0 c1 c2 c3
4 | a8 .  .  .
5 | c4 c5 c6 .
6 | . . . .
7 | . . . .
"""


def test_drawings(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("4.3", RIGHT, capsys)[0]
    for wrong, words in [
        (RIGHT.replace("c0 c1 c2 c3", "b0 b1 b2 ."), "block 3: look again at place 0 (b0), place 1 (b1), place 2 (b2)"),
        (RIGHT.replace("4 | a8 .  .  .", "4 | a8"), "block 4 has 1 places, a block has 4"),
        (RIGHT.replace("7 | . . . .", ""), "block 7 is not in the drawing"),
        (RIGHT.replace("7 | . . . .", "seven"), "'seven' is not of the form"),
        ({1: "a0"}, "the drawing must be text, got dict"),
    ]:
        passed, said = outcome("4.3", wrong, capsys)
        assert not passed and words in said
