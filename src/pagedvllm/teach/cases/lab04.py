"""Lab 4: a block allocator, a test that finds planted bugs, and memory drawn by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.request import Request
from pagedvllm.teach.labs import Case, Task

# ---------------------------------------------------------------- 4.1 the block allocator

Operation = tuple[str, str, int]  # ("allocate", name, tokens in all) or ("free", name, 0)


class Model:
    """What is right: the engine's own manager behind the interface of the task."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size)
        self.requests: dict[str, Request] = {}

    def allocate(self, name: str, num_tokens: int) -> list[int] | None:
        request = self.requests.setdefault(name, Request(name, [0]))
        return self.kv.allocate(request, num_tokens)

    def free(self, name: str) -> None:
        self.kv.free(self.requests.pop(name))

    def table(self, name: str) -> list[int]:
        return self.kv.block_ids(name)


def _operations_case(note: str, num_blocks: int, block_size: int, operations: list[Operation]) -> Case:
    return Case((num_blocks, block_size), note=note, check=partial(_check_allocator, operations=operations))


def _check_allocator(got: Any, num_blocks: int, block_size: int, operations: list[Operation]) -> str:
    """Run the operations on the answer and on the model; the first that differs, with what led to it."""
    model, done, names = Model(num_blocks, block_size), list[str](), set[str]()
    for what, name, tokens in operations:
        names.add(name)
        done.append(f"{what}({name!r}, {tokens})" if what == "allocate" else f"free({name!r})")
        where = "after " + ("..., " if len(done) > 4 else "") + ", ".join(done[-4:])
        try:
            if what == "free":
                got.free(name)
                model.free(name)
            elif (result := got.allocate(name, tokens)) != (expected := model.allocate(name, tokens)):
                return f"{where}: expected {expected}, got {result}"
            tables = [(other, list(got.table(other)), model.table(other)) for other in sorted(names)]
        except Exception as error:  # whatever the reader's code raises is an outcome
            return f"{where}: raised {type(error).__name__}: {error}"
        for other, table, right in tables:
            if table != right:
                return f"{where}: the table of {other!r} is {table}, expected {right}"
    return ""


def random_operations(seed: int, num_blocks: int, block_size: int, count: int = 60) -> list[Operation]:
    """Requests that come, grow by a few tokens at a time, are refused, and go."""
    rng, tokens, operations = random.Random(seed), dict[str, int](), list[Operation]()
    for number in range(count):
        if tokens and rng.random() < 0.25:
            name = rng.choice(sorted(tokens))
            del tokens[name]
            operations.append(("free", name, 0))
        else:
            name = rng.choice([*sorted(tokens), f"r{number}"])
            tokens[name] = tokens.get(name, 0) + rng.randrange(1, 3 * block_size)
            operations.append(("allocate", name, tokens[name]))
    return operations


ALLOCATOR_CASES = [
    _operations_case("blocks come in order, from 1", 8, 4, [("allocate", "a", 9), ("allocate", "b", 1)]),
    _operations_case(
        "a last block with room", 8, 4, [("allocate", "a", 5), ("allocate", "a", 8), ("allocate", "a", 9)]
    ),
    _operations_case("exactly full", 8, 4, [("allocate", "a", 8), ("allocate", "b", 4)]),
    _operations_case("all of it", 4, 4, [("allocate", "a", 12), ("allocate", "b", 1)]),
    _operations_case("all or nothing", 5, 4, [("allocate", "a", 9), ("allocate", "b", 5), ("allocate", "c", 4)]),
    _operations_case("refused while it grows", 4, 4, [("allocate", "a", 9), ("allocate", "a", 13)]),
    _operations_case(
        "freed tail first, used next", 8, 4, [("allocate", "a", 9), ("free", "a", 0), ("allocate", "b", 9)]
    ),
    _operations_case(
        "the latest freed is the first used",
        9,
        4,
        [("allocate", n, 8) for n in "abc"] + [("free", "a", 0), ("free", "c", 0), ("allocate", "d", 20)],
    ),
    *(_operations_case(f"60 random calls, {seed}", 12, 4, random_operations(seed, 12, 4)) for seed in range(3)),
    _operations_case("60 random calls, blocks of 1", 20, 1, random_operations(9, 20, 1)),
]

# ---------------------------------------------------------------- 4.2 planted bugs


class LeakyManager(KVCacheManager):
    """A block that was never filled is forgotten when its request goes."""

    def free(self, request: Request, until: int = 0) -> None:
        table = self.tables.get(request.request_id, [])
        full = request.num_computed_tokens // self.block_size
        self.tables[request.request_id] = table[:full]
        super().free(request, until)


class EagerManager(KVCacheManager):
    """An abort under a running step frees at once, and again when the step is done."""

    def free(self, request: Request, until: int = 0) -> None:
        table = self.tables.get(request.request_id, [])
        super().free(request, until)
        if until:
            self.pool.free(table)


class ShortManager(KVCacheManager):
    """The first token of a new block gets none."""

    def allocate(self, request: Request, num_new_tokens: int, *limits: int, **more: int) -> list[int] | None:
        last = request.num_computed_tokens + num_new_tokens
        if last % self.block_size == 1 and last > 1:
            num_new_tokens -= 1
        return super().allocate(request, num_new_tokens, *limits, **more)


class ForgetfulManager(KVCacheManager):
    """What was freed under a running step never comes back."""

    def step_done(self, step: int, failed: bool = False) -> None:
        self.deferred.clear()


class LateManager(KVCacheManager):
    """A table that is freed after a refusal of its request is freed twice."""

    def allocate(self, request: Request, num_new_tokens: int, *limits: int, **more: int) -> list[int] | None:
        added = super().allocate(request, num_new_tokens, *limits, **more)
        if added is None and request.request_id in self.tables:
            self.pool.free(self.tables[request.request_id][-1:])
        return added


class RoundedManager(KVCacheManager):
    """One block more than needed at every boundary."""

    def allocate(self, request: Request, num_new_tokens: int, *limits: int, **more: int) -> list[int] | None:
        last = request.num_computed_tokens + num_new_tokens
        return super().allocate(request, num_new_tokens + (last % self.block_size == 0), *limits, **more)


PLANTED: dict[str, type[KVCacheManager]] = {"A": EagerManager, "B": ShortManager, "C": LeakyManager}
BUGS = ("double free", "off by one", "leak", "none")


def _bug_case(note: str, manager: type[KVCacheManager], bug: str) -> Case:
    def check(got: Any, _: Callable[[], KVCacheManager]) -> str:
        if got not in BUGS:
            return f"expected one of {', '.join(BUGS)}, got {got!r}"
        if got == bug:
            return ""
        if bug == "none":
            return f"found {got!r} where there is no bug"
        return f"expected {bug!r}, got {got!r}" + (" (did your calls make it happen?)" if got == "none" else "")

    class Make:
        """Hides which manager it makes; a case prints its arguments."""

        def __call__(self) -> KVCacheManager:
            return manager(6, 4)

        def __repr__(self) -> str:
            return "make"

    return Case(lambda: (Make(),), note=note, check=check)


BUG_CASES = [
    *(_bug_case(f"manager {name}", kind, BUGS[i]) for i, (name, kind) in enumerate(PLANTED.items())),
    _bug_case("the engine's own", KVCacheManager, "none"),
    _bug_case("a bug that you have not seen, 1", ForgetfulManager, "leak"),
    _bug_case("a bug that you have not seen, 2", LateManager, "double free"),
    _bug_case("a bug that you have not seen, 3", RoundedManager, "off by one"),
]

# ---------------------------------------------------------------- 4.3 logical to physical, drawn by hand


def story() -> tuple[KVCacheManager, dict[str, Request]]:
    """The five events of the task, through the engine's own manager."""
    kv, requests = KVCacheManager(8, 4), dict[str, Request]()
    for what, name, tokens in (
        ("grow", "a", 6),
        ("grow", "b", 3),
        ("grow", "a", 9),
        ("free", "b", 0),
        ("grow", "c", 7),
    ):
        request = requests.setdefault(name, Request(name, [0] * 9))
        if what == "free":
            kv.free(requests.pop(name))
        else:
            kv.allocate(request, tokens - request.num_computed_tokens)
            request.num_computed_tokens = tokens
    return kv, requests


def picture() -> dict[int, list[str]]:
    """Physical block -> what is in its places: "a0" is token 0 of request a, "." is empty."""
    kv, requests = story()
    rows = {block: ["."] * 4 for block in range(1, 8)}
    for name, request in requests.items():
        table = kv.block_ids(name)
        assert len(table) == blocks_for(request.num_computed_tokens, 4)
        for token in range(request.num_computed_tokens):
            rows[table[token // 4]][token % 4] = f"{name}{token}"
    return rows


def parse(drawing: str) -> dict[int, list[str]]:
    """The lines of a drawing ("3 | c0 c1 . ."), what they say and nothing else."""
    rows: dict[int, list[str]] = {}
    for line in filter(None, map(str.strip, drawing.splitlines())):
        number, bar, places = line.partition("|")
        if not bar or not number.strip().isdigit():
            raise ValueError(f"{line!r} is not of the form '3 | c0 c1 . .'")
        rows[int(number)] = places.split()
    return rows


def _check_row(got: Any, block: int) -> str:
    if not isinstance(got, str):
        return f"the drawing must be text, got {type(got).__name__}"
    try:
        rows = parse(got)
    except ValueError as error:
        return str(error)
    places, right = rows.get(block), picture()[block]
    if places is None:
        return f"block {block} is not in the drawing"
    if len(places) != 4:
        return f"block {block} has {len(places)} places, a block has 4"
    wrong = [place for place in range(4) if places[place] != right[place]]
    return "" if not wrong else f"block {block}: {_say(places, wrong)}"


def _say(places: list[str], wrong: list[int]) -> str:
    return "look again at " + ", ".join(f"place {place} ({places[place]})" for place in wrong)


PICTURE_CASES = [Case(check=partial(_check_row, block=block), note=f"block {block}") for block in range(1, 8)]

# ---------------------------------------------------------------- the lab

TASKS = {
    "4.1": Task("The block allocator", ALLOCATOR_CASES),
    "4.2": Task("Find the bug", BUG_CASES),
    "4.3": Task("From token to place, drawn by hand", PICTURE_CASES),
}
