"""Lab 2: the flat batch builder; the batch size that a model and a machine ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pagedvllm.batch import Span, build_batch, contiguous_slots
from pagedvllm.model.config import DecoderConfig
from pagedvllm.request import Request
from pagedvllm.roofline import Machine, decode_batch, step_cost
from pagedvllm.teach.cases.lab01 import CONFIGS
from pagedvllm.teach.labs import Case, Task, same

# ---------------------------------------------------------------- 2.1 the flat batch

FIELDS = ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "sample_rows")
Sequence_ = tuple[list[int], int, int, int]  # token ids, how many are computed, how many to compute now, first slot


def flat(sequences: Sequence[Sequence_]) -> dict[str, list[int]]:
    """The right answer, by the engine's own builder."""
    spans, first_slots = [], {}
    for i, (token_ids, computed, new, first) in enumerate(sequences):
        spans.append(Span(Request(str(i), token_ids), computed, computed + new))
        first_slots[str(i)] = first
    batch = build_batch(spans, contiguous_slots(first_slots))
    return {name: list(getattr(batch, name)) for name in FIELDS}


def _batch_case(note: str, *sequences: Sequence_) -> Case:
    return Case((list(sequences),), note=note, check=_check_batch)


def _check_batch(got: Any, sequences: Sequence[Sequence_]) -> str:
    expected = flat(sequences)
    if not isinstance(got, dict) or set(got) != set(FIELDS):
        return f"expected a dict with the keys {', '.join(FIELDS)}, got {got!r}"
    wrong = [name for name in FIELDS if not same(got[name], expected[name])]
    if not wrong:
        return ""
    name = wrong[0]
    return f"{name}: expected {expected[name]}, got {got[name]!r}{_hint(name, got[name], expected, sequences)}"


def _hint(name: str, got: Any, expected: dict[str, list[int]], sequences: Sequence[Sequence_]) -> str:
    """What somebody who got this value will have thought."""
    starts, rows = expected["query_start_loc"], range(len(expected["token_ids"]))
    mistakes: dict[str, list[tuple[list[int], str]]] = {
        "token_ids": [
            ([t for ids, *_ in sequences for t in ids], "only those that are to be computed now"),
            (
                [t for ids, _, new, _ in sequences for t in ids[:new]],
                "the computed ones come first, and are not repeated",
            ),
        ],
        "positions": [
            (list(rows), "positions count within a sequence, not within the batch"),
            ([i for *_, new, _ in sequences for i in range(new)], "a span begins where the computed tokens end"),
        ],
        "slot_mapping": [
            (
                [first + i for *_, new, first in sequences for i in range(new)],
                "the computed tokens hold the first slots",
            ),
            (expected["positions"], "a sequence's slots begin at its first slot"),
        ],
        "query_start_loc": [
            (starts[:-1], "the end of the last sequence is needed, too"),
            (starts[1:], "the first sequence begins at 0"),
        ],
        "seq_lens": [
            ([new for *_, new, _ in sequences], "the tokens computed earlier count as well"),
            ([len(ids) for ids, *_ in sequences], "tokens that are still to come do not count"),
        ],
        "sample_rows": [
            ([end - 1 for end in starts[1:]], "in the middle of a prompt nothing is sampled"),
            (list(starts[1:]), "rows count from 0"),
        ],
    }
    return next((f" ({hint})" for value, hint in mistakes[name] if same(got, value)), "")


BATCH_CASES = [
    _batch_case("one prompt", ([5, 6, 7], 0, 3, 0)),
    _batch_case("one decode step", ([5, 6, 7, 8], 3, 1, 0)),
    _batch_case("two decode steps, in two stretches of the cache", ([5, 6], 1, 1, 0), ([7, 8, 9], 2, 1, 8)),
    _batch_case("a prompt joins two that decode", ([5, 6], 1, 1, 16), ([7, 8, 9], 2, 1, 0), ([4, 3, 2, 1], 0, 4, 8)),
    _batch_case("a piece of a prompt: its next token is known", ([1, 2, 3, 4, 5, 6], 0, 2, 8)),
    _batch_case("the last piece of a prompt", ([1, 2, 3, 4, 5, 6], 2, 4, 8)),
    _batch_case(
        "all kinds together",
        ([9, 8, 7, 6], 3, 1, 24),
        ([1, 2, 3, 4, 5, 6, 7], 2, 3, 8),
        ([11, 12, 13], 0, 3, 0),
        ([21, 22, 23, 24, 25], 3, 2, 16),
    ),
    _batch_case("nobody"),
]

# ---------------------------------------------------------------- 2.2 the batch size

MACHINES = {
    "laptop": Machine(40e9, 400e9),
    "H100": Machine(3.35e12, 989.5e12),
    "two H100": Machine(6.7e12, 1979e12),
}


def batch_sizes(
    config: DecoderConfig, machine: Machine, context: int, free: float, bytes_per_element: int
) -> tuple[int, int | None]:
    """The right answer: (how many fit, how many it takes until arithmetic is the limit; None: no batch does)."""
    one = step_cost(config, decode_batch(1, context), bytes_per_element)
    computing = one.flops / machine.flops_per_second
    reading = one.kv_bytes / machine.bytes_per_second
    weights = one.weight_bytes / machine.bytes_per_second
    knee = math.ceil(weights / (computing - reading)) if computing > reading else None
    return int(free // one.kv_bytes), knee


def _size_case(model: str, machine: str, context: int, free: float, size: int) -> Case:
    config = DecoderConfig.from_dict(CONFIGS[model])
    args = (config, MACHINES[machine], context, free, size)
    note = f"{model} on {machine}, {context:,} tokens each, {free / 1e9:g} GB free, {size} B a number"
    return Case(args, note=note, check=_check_sizes)


def _check_sizes(
    got: Any, config: DecoderConfig, machine: Machine, context: int, free: float, bytes_per_element: int
) -> str:
    expected = batch_sizes(config, machine, context, free, bytes_per_element)
    if same(got, expected):
        return ""
    reason = f"expected {expected}, got {got!r}"
    if not isinstance(got, tuple) or len(got) != 2:
        return f"{reason} (a pair is asked for)"
    one = step_cost(config, decode_batch(1, context), bytes_per_element)
    per_weight = machine.knee * bytes_per_element / 2
    if got[0] == expected[0] and isinstance(got[1], (int, float)) and abs(got[1] - per_weight) <= 1:
        return f"{reason} (that counts the weights alone: the caches are read as well)"
    if got[0] == int((free - one.weight_bytes) // one.kv_bytes):
        return f"{reason} (the weights are already taken off)"
    return reason


SIZE_CASES = [
    _size_case("SmolLM2-135M", "laptop", 32, 4e9, 4),
    _size_case("SmolLM2-135M", "laptop", 2000, 4e9, 4),
    _size_case("Llama-3.1-8B", "H100", 100, 60e9, 2),
    _size_case("Llama-3.1-8B", "H100", 4000, 60e9, 2),
    _size_case("Llama-3.1-70B", "two H100", 1000, 18.9e9, 2),
    _size_case("Qwen3-0.6B", "H100", 100, 70e9, 2),
]

# ---------------------------------------------------------------- the lab

TASKS = {
    "2.1": Task("The flat batch", BATCH_CASES),
    "2.2": Task("How many requests at once", SIZE_CASES),
}
