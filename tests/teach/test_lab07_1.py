"""Lab 7.1's grader: right answers pass; the mistakes people make fail with words that help."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedvllm.teach import puzzles
from pagedvllm.teach.cases.lab07_1 import cache_write, run_rows, vectorised
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


# ---------------------------------------------------------------- 7.1.1


def arrays(
    rows: Any, starts: Any, num_new: Any, tables: Any, size: int, mistake: str = ""
) -> tuple[Any, Any, Any]:  # fmt: skip
    """A right solution, and what people write instead."""
    stops = num_new.cumsum()
    first = starts if mistake == "off by a segment" else starts + num_new
    row = (np.arange(len(rows)) if mistake == "rows from 0" else rows).repeat(num_new)
    positions = np.arange(stops[-1]) + (first - stops).repeat(num_new)
    blocks = tables[row, positions // size]
    slots = blocks + positions % size if mistake == "no block size" else blocks * size + positions % size
    starts_of = stops if mistake == "no zero" else np.concatenate(([0], stops))
    return positions, slots, starts_of


def looped(rows: Any, starts: Any, num_new: Any, tables: Any, size: int) -> tuple[Any, Any, Any]:
    positions = [p for start, new in zip(starts, num_new, strict=True) for p in range(start, start + new)]
    _, slots, stops = arrays(rows, starts, num_new, tables, size)
    return np.array(positions), slots, stops


def test_right_arrays_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("7.1.1", vectorised(arrays), capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("off by a segment", "positions: expected [5], got [4]"),
        ("rows from 0", "row 1 is left out: input (array([0, 2])"),
        ("no block size", "slot_mapping: expected [29], got [8]"),
        ("no zero", "query_start_loc: expected [0, 1], got [1]"),
    ],
)
def test_wrong_arrays_fail(mistake: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("7.1.1", partial(arrays, mistake=mistake), capsys)
    assert not passed and words in said


def test_a_loop_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("7.1.1", vectorised(looped), capsys)
    assert not passed and "there is a loop in it" in said


def test_no_arrays_fail(capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("7.1.1", vectorised(lambda *_: np.zeros(3)), capsys)
    assert not passed and "expected three arrays" in said


# ---------------------------------------------------------------- 7.1.2

if puzzles.available():
    from pagedvllm.teach.puzzles import tl, triton

    @triton.jit
    def stub(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        raise NotImplementedError("your code")

    @triton.jit
    def right(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            column = tl.arange(0, BLOCK)
            inside = column < ROW
            key = tl.load(k_ptr + token * ROW + column, mask=inside)
            tl.store(cache_ptr + slot * ROW + column, key, mask=inside)

    @triton.jit
    def writes_padding(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token)
        column = tl.arange(0, BLOCK)
        key = tl.load(k_ptr + token * ROW + column, mask=column < ROW)
        tl.store(cache_ptr + slot * ROW + column, key, mask=column < ROW)

    @triton.jit
    def no_mask(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            column = tl.arange(0, BLOCK)
            tl.store(cache_ptr + slot * ROW + column, tl.load(k_ptr + token * ROW + column))

    @triton.jit
    def wide_rows(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            column = tl.arange(0, BLOCK)
            key = tl.load(k_ptr + token * BLOCK + column, mask=column < ROW)
            tl.store(cache_ptr + slot * BLOCK + column, key, mask=column < ROW)

    @triton.jit
    def in_order(k_ptr, slots_ptr, cache_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        key = tl.load(k_ptr + token * ROW + column, mask=column < ROW)
        tl.store(cache_ptr + token * ROW + column, key, mask=column < ROW)

    def test_a_kernel_stub_is_not_attempted(capsys: pytest.CaptureFixture[str]) -> None:
        assert outcome("7.1.2", partial(cache_write, stub), capsys) == (
            False,
            "7.1.2 The cache write, as a Triton kernel (the book's solution): not attempted\n",
        )

    def test_a_right_kernel_passes(capsys: pytest.CaptureFixture[str]) -> None:
        assert outcome("7.1.2", partial(cache_write, right), capsys)[0]

    @pytest.mark.parametrize(
        ("kernel", "words"),
        [
            (writes_padding, "something was written before the beginning of the cache"),
            (no_mask, "something was written behind the end of the cache"),
            (wide_rows, "slot 2 holds [-7, -7, -7, -7, 1, 2], and should hold [1, 2, 3, 4, 5, 6]"),
            (in_order, "slot 0 holds [1, 2, 3, 4], and should hold [-7, -7, -7, -7] (-7: not written)"),
        ],
    )
    def test_wrong_kernels_fail(kernel: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        passed, said = outcome("7.1.2", partial(cache_write, kernel), capsys)
        assert not passed and words in said


def test_without_triton_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel can still be written down: with stand-ins for what its head names."""
    from pagedvllm.teach import labs

    for module in (puzzles, labs):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    triton, tl = puzzles.load()

    @triton.jit
    def kernel(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr, tl.arange(0, BLOCK))

    passed, said = outcome("7.1.2", partial(cache_write, kernel), capsys)
    assert not passed and said.endswith("not run: no triton\n")


def test_triton_that_was_imported_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    if puzzles.available():
        puzzles.load()
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(RuntimeError, match="restart the notebook"):
            puzzles.load()


# ---------------------------------------------------------------- 7.1.3


class Books:
    """A right solution, with switches that spoil it."""

    shifts = stale_tail = keeps_last = forgets_name = False

    def __init__(self, num_rows: int, longest: int) -> None:
        self.tokens, self.lengths = np.zeros((num_rows, longest), int), np.zeros(num_rows, int)
        self.names, self.row_of = list[str](), dict[str, int]()

    def add(self, name: str, token_ids: list[int]) -> None:
        row = self.row_of[name] = len(self.names)
        self.names.append(name)
        self.tokens[row, : len(token_ids)] = token_ids
        self.lengths[row] = len(token_ids)

    def append(self, name: str, token: int) -> None:
        row = self.row_of[name]
        self.tokens[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def remove(self, name: str) -> None:
        row = self.row_of.pop(name)
        last = len(self.names) - 1
        if self.shifts:
            self.names.pop(row)
            here, above = slice(row, last), slice(row + 1, last + 1)
            self.tokens[here], self.lengths[here] = self.tokens[above], self.lengths[above]
            self.row_of = {n: r for r, n in enumerate(self.names)}
        else:
            mover = self.names.pop()
            if row != last:
                count = self.lengths[last] if self.stale_tail else self.tokens.shape[1]
                self.tokens[row, :count] = self.tokens[last, :count]
                self.lengths[row] = self.lengths[last]
                self.names[row] = mover
                if not self.forgets_name:
                    self.row_of[mover] = row
        if not self.keeps_last:
            self.tokens[last], self.lengths[last] = 0, 0


def driven(books: type[Books]) -> Any:
    return lambda operations, num_rows, longest: run_rows(books, operations, num_rows, longest)


def test_right_books_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("7.1.3", driven(Books), capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("shifts", "after 4 operations, remove 'a': row_of is {'b': 0, 'c': 1}, and should be {'c': 0, 'b': 1}"),
        ("stale_tail", "behind the end of row 0 (c) is [4, 5, 0, 0, 0], and should be zeros"),
        ("keeps_last", "after 4 operations, remove 'c': the length of row 2 (empty) is 3, and should be 0"),
        ("forgets_name", "row_of is {'b': 1, 'c': 2}, and should be {'c': 0, 'b': 1}"),
    ],
)
def test_wrong_books_fail(mistake: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("7.1.3", driven(type("Wrong", (Books,), {mistake: True})), capsys)
    assert not passed and words in said
