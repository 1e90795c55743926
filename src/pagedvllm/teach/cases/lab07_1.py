"""Lab 7.1: a step's arrays without a loop, the cache write as a kernel, and the books of rows."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch

from pagedvllm.attention.paged import paged_slots
from pagedvllm.batch import Span, build_batch
from pagedvllm.request import Request
from pagedvllm.teach import puzzles
from pagedvllm.teach.labs import Case, Task

# ---------------------------------------------------------------- 7.1.1 positions, slots and starts


def expected_arrays(
    rows: Sequence[int], starts: Sequence[int], num_new: Sequence[int], tables: Any, block_size: int
) -> dict[str, list[int]]:
    """What the functions of chapters 2 and 4 make of the same step."""
    spans = [
        Span(Request(str(row), [0] * (start + new)), start, start + new)
        for row, start, new in zip(rows, starts, num_new, strict=True)
    ]

    def slots_of(span: Span) -> list[int]:
        table = tables[int(span.request.request_id)].tolist()
        return paged_slots(table, block_size, span.start, span.end)

    batch = build_batch(spans, slots_of)
    return {
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "query_start_loc": batch.query_start_loc,
    }


def _arrays_case(note: str, rows: list[int], starts: list[int], num_new: list[int], tables: list[list[int]]) -> Case:
    table = np.array(tables)
    arrays = tuple(np.array(values) for values in (rows, starts, num_new))
    want = expected_arrays(rows, starts, num_new, table, 4)

    def check(got: Any, *_: Any) -> str:
        if not isinstance(got, tuple) or len(got) != len(want):
            return f"expected three arrays, {', '.join(want)}"
        for name, values, right in zip(want, got, want.values(), strict=True):
            found = np.asarray(values).tolist()
            if found != right:
                return f"{name}: expected {right}, got {found}"
        return ""

    return Case((*arrays, table, 4), check=check, note=note)


def _random_arrays(seed: int) -> Case:
    """Some rows of a batch of six, in steps of any kind."""
    rng, ids = random.Random(seed), list(range(1, 31))
    rng.shuffle(ids)
    tables = [ids[5 * r : 5 * r + 5] for r in range(6)]
    rows = sorted(rng.sample(range(6), rng.randrange(1, 7)))
    starts = [rng.randrange(0, 19) for _ in rows]
    num_new = [rng.randrange(1, 21 - start) for start in starts]
    return _arrays_case(f"a random step, {seed}", rows, starts, num_new, tables)


ARRAYS_CASES = [
    _arrays_case("one request decodes", [0], [5], [1], [[3, 7]]),
    _arrays_case("one prompt", [0], [0], [6], [[5, 2]]),
    _arrays_case("the chapter's step", [0, 1, 2], [4, 5, 0], [3, 1, 4], [[5, 2], [3, 7], [1, 0]]),
    _arrays_case("all decode, at block borders", [0, 1, 2], [3, 4, 7], [1, 1, 1], [[5, 2], [3, 7], [1, 6]]),
    _arrays_case("row 1 is left out", [0, 2], [4, 2], [2, 3], [[5, 2], [3, 7], [1, 6]]),
    *(_random_arrays(seed) for seed in range(4)),
]

_LOOPS = ("FOR_ITER", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


def vectorised(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, unless it has a loop in it: then calling it raises ValueError."""

    def run(*args: Any) -> Any:
        got = answer(*args)  # first, so that a stub is a stub
        if _has_loop(getattr(answer, "__code__", None)):
            raise ValueError("there is a loop in it: whole arrays only")
        return got

    return run


def _has_loop(code: CodeType | None) -> bool:
    """`for`, `while` and comprehensions, also in functions inside."""
    if code is None:
        return False
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(i.opname in _LOOPS for i in dis.get_instructions(code)) or any(map(_has_loop, inner))


# ---------------------------------------------------------------- 7.1.2 the cache write

GUARD = 1 << 14  # numbers before and behind all that a kernel gets: wrong addresses must not end the process
EMPTY = -7.0  # what is in a place of the cache that was not written


def write_cache_spec(k: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Row t of k [T, row] goes to row slots[t] of the cache [slots, row]; -1: nowhere."""
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot] = k[t]


@dataclass(frozen=True)
class Written:
    """What a kernel made of an empty cache, and where outside of it it wrote: "before", "behind" or "" (nowhere)."""

    cache: torch.Tensor  # [slots, row]
    outside: str


def cache_write(kernel: Any, k: torch.Tensor, slots: torch.Tensor, num_slots: int) -> Written:
    """Run a kernel on an empty cache: a program for each token. Whoever reads too far gets NaN, or slot -1."""
    num_tokens, row = k.shape
    keys, places = _guarded(k, float("nan")), _guarded(slots, -1)
    memory = torch.full((2 * GUARD + num_slots * row,), EMPTY)
    cache = memory[GUARD:-GUARD]
    width = 1 << (row - 1).bit_length()  # the next power of two
    inner = slice(GUARD, -GUARD)
    puzzles.run(kernel, (num_tokens,), keys[inner], places[inner], cache, ROW=row, BLOCK=width)
    spoilt = {"before": memory[:GUARD], "behind": memory[-GUARD:]}
    outside = next((where for where, part in spoilt.items() if not (part == EMPTY).all()), "")
    return Written(cache.view(num_slots, row), outside)


def _guarded(values: torch.Tensor, fill: float) -> torch.Tensor:
    """The same numbers in one piece, with `fill` on both sides."""
    memory = torch.full((2 * GUARD + values.numel(),), fill, dtype=values.dtype)
    memory[GUARD:-GUARD] = values.flatten()
    return memory


def _write_case(note: str, slots: list[int], row: int, num_slots: int = 12) -> Case:
    keys = torch.arange(1.0, len(slots) * row + 1).view(-1, row)
    places = torch.tensor(slots)
    want = torch.full((num_slots, row), EMPTY)
    write_cache_spec(keys, places, want)

    def check(got: Written, *_: Any) -> str:
        if got.outside:
            end = {"before": "the beginning", "behind": "the end"}[got.outside]
            return f"something was written {got.outside} {end} of the cache"
        cache = got.cache
        for slot in range(num_slots):
            if not torch.equal(cache[slot], want[slot]):
                found, right = ([round(x) if x == x else "NaN" for x in t[slot].tolist()] for t in (cache, want))
                return f"slot {slot} holds {found}, and should hold {right} ({round(EMPTY)}: not written)"
        return ""

    return Case((keys, places, num_slots), check=check, note=note)


WRITE_CASES = [
    _write_case("one token", [5], 4),
    _write_case("a prompt in two blocks", [4, 5, 6, 7, 0, 1], 4),
    _write_case("a row of 6 numbers, not a power of two", [2, 5], 6),
    _write_case("the last slot, 6 numbers", [11, 0], 6),
    _write_case("padding", [3, -1, 8, -1], 4),
    _write_case("nothing but padding", [-1, -1], 5),
    _write_case("a row of one number", [7, 1, 4], 1),
    _write_case("many tokens", list(range(39, 19, -1)), 3, num_slots=40),
]

# ---------------------------------------------------------------- 7.1.3 the books of rows

Operation = tuple[str, str, list[int]]  # "add", name, tokens; "append", name, [token]; "remove", name, []


def run_rows(make: Callable[[int, int], Any], operations: Sequence[Operation], num_rows: int, longest: int) -> str:
    """Drive the reader's books and compare with ours after each operation: "" if all is well."""
    books = make(num_rows, longest)
    names: list[str] = []
    held: dict[str, list[int]] = {}
    for n, (what, name, tokens) in enumerate(operations, 1):
        call = f"after {n} operations, {what} {name!r}"
        if what == "add":
            books.add(name, list(tokens))
            names.append(name)
            held[name] = list(tokens)
        elif what == "append":
            books.append(name, tokens[0])
            held[name] += tokens
        else:
            books.remove(name)
            last = names.pop()
            if last != name:
                names[names.index(name)] = last
            del held[name]
        if reason := _wrong_rows(books, names, held, num_rows, longest):
            return f"{call}: {reason}"
    return "right"


def _wrong_rows(books: Any, names: list[str], held: dict[str, list[int]], num_rows: int, longest: int) -> str:
    want = {name: row for row, name in enumerate(names)}
    if dict(books.row_of) != want:
        return f"row_of is {dict(books.row_of)}, and should be {want}"
    for row in range(num_rows):
        mine = held[names[row]] if row < len(names) else []
        whose = f"row {row} ({names[row]})" if row < len(names) else f"row {row} (empty)"
        if int(books.lengths[row]) != len(mine):
            return f"the length of {whose} is {int(books.lengths[row])}, and should be {len(mine)}"
        found = np.asarray(books.tokens[row]).tolist()
        if found[: len(mine)] != mine:
            return f"{whose} holds {found[: len(mine)]}, and should hold {mine}"
        if any(found[len(mine) : longest]):
            return f"behind the end of {whose} is {found[len(mine) :]}, and should be zeros"
    return ""


def random_rows(seed: int, num_rows: int, longest: int, count: int = 40) -> Iterator[Operation]:
    """Requests that come, grow and go, in any order."""
    rng, held, number = random.Random(seed), dict[str, int](), 0
    for _ in range(count):
        growing = [name for name, length in held.items() if length < longest]
        what = rng.choice(["add", "append", "append", "remove"])
        if what == "append" and growing:
            name = rng.choice(growing)
            held[name] += 1
            yield what, name, [rng.randrange(1, 100)]
        elif what == "remove" and held:
            name = rng.choice(list(held))
            del held[name]
            yield what, name, []
        elif len(held) < num_rows:
            name, length, number = f"r{number}", rng.randrange(1, longest), number + 1
            held[name] = length
            yield "add", name, [rng.randrange(1, 100) for _ in range(length)]


def _rows_case(note: str, operations: Sequence[Operation], num_rows: int = 4, longest: int = 8) -> Case:
    def check(got: Any, *_: Any) -> str:
        return "" if got == "right" else str(got)

    return Case((_Quiet(operations), num_rows, longest), check=check, note=note)


class _Quiet(list[Operation]):
    """A case prints its arguments; these are told operation by operation."""

    def __repr__(self) -> str:
        return f"{len(self)} operations"


_ABC: list[Operation] = [("add", "a", [1, 2, 3, 4, 5]), ("add", "b", [6, 7]), ("add", "c", [8, 9, 10])]
ROWS_CASES = [
    _rows_case("three come", _ABC),
    _rows_case("they grow", [*_ABC, ("append", "b", [11]), ("append", "c", [12]), ("append", "b", [13])]),
    _rows_case("the last one goes", [*_ABC, ("remove", "c", [])]),
    _rows_case("the first one goes", [*_ABC, ("remove", "a", [])]),
    _rows_case("a short row takes the place of a long one", [*_ABC, ("remove", "a", []), ("append", "c", [11])]),
    _rows_case("and one comes after that", [*_ABC, ("remove", "a", []), ("add", "d", [11]), ("append", "c", [12])]),
    _rows_case("all go", [*_ABC, ("remove", "b", []), ("remove", "a", []), ("remove", "c", []), ("add", "a", [1])]),
    *(_rows_case(f"40 random operations, {seed}", list(random_rows(seed, 4, 8))) for seed in range(3)),
]

# ---------------------------------------------------------------- the lab

TASKS = {
    "7.1.1": Task("A step's arrays, without a loop", ARRAYS_CASES),
    "7.1.2": Task("The cache write, as a Triton kernel", WRITE_CASES, needs="triton"),
    "7.1.3": Task("The books of rows", ROWS_CASES),
}
