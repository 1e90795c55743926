"""Recorded decisions of vLLM 0.30.0, to replay in a chapter and compare.

Each file in recorded/ holds a workload and the trace of vLLM's synchronous scheduler on it, both in the formats of
`pagedvllm replay`. They were recorded without a model: the tokens are a hash of request and position.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedvllm.workload import Workload

FOLDER = Path(__file__).parent / "recorded"
Line = dict[str, Any]

# Of cascade attention, which is not in this book; and of a hash function that may differ.
NOT_COMPARED = frozenset({"num_common_prefix_blocks", "block_hashes"})
# What only a manager that knows which blocks are whose can say.
BLOCK_FIELDS = frozenset({"new_block_ids", "blocks", "cached_blocks", "free_queue", "ref_cnt"})
ORDERED = frozenset({"scheduled"})  # an object whose order says who went first


def golden(name: str) -> tuple[Workload, list[Line]]:
    """A recorded workload, and vLLM's trace of it: golden("n08_priority_preempt").

    Raises:
        ValueError: there is no recording of that name.
    """
    from pagedvllm.workload import parse

    names = sorted(file.stem for file in FOLDER.glob("*.json"))
    if name not in names:
        raise ValueError(f"there is no recording {name!r}; there are {', '.join(names)}")
    data = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return parse(data["workload"]), data["trace"]


def differences(theirs: Iterable[Line], ours: Iterable[Line], skip: Collection[str] = ()) -> list[str]:
    """Where two traces differ, one string for each field of each step: [] if every decision is the same."""
    found: list[str] = []
    leave = NOT_COMPARED | set(skip)
    for number, (want, got) in enumerate(zip_longest(theirs, map(_plain, ours))):
        if want is None or got is None:
            found.append(f"step {number}: {'vLLM has' if want is None else 'we have'} no such step")
            break
        found += [f"step {number}: {difference}" for difference in _fields(want, got, leave)]
    return found


def compared_fields(theirs: Iterable[Line], skip: Collection[str] = ()) -> int:
    """How many values `differences` compares."""
    return sum(len(line.keys() - NOT_COMPARED - set(skip)) for line in theirs)


def _plain(line: Line) -> Line:
    """What is left of a line once it has been JSON: the keys of ours may be integers, its lists tuples."""
    plain: Line = json.loads(json.dumps(line))
    return plain


def _fields(want: Line, got: Line, leave: Collection[str]) -> Iterator[str]:
    for name in sorted((want.keys() | got.keys()) - set(leave)):
        a: Any = want.get(name)
        b: Any = got.get(name)
        if name == "requests" and isinstance(a, dict) and isinstance(b, dict):  # of the last line: what became of each
            for request in sorted(a.keys() | b.keys()):
                yield from (f"{request} {d}" for d in _fields(a.get(request, {}), b.get(request, {}), leave))
        elif a != b or (name in ORDERED and list(a) != list(b)):
            yield f"{name}: vLLM {a}, we {b}"
