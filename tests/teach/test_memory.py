"""Chapter 4's accounts of memory, checked by hand; its pictures say what they show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.model.rotary import rotary_table
from pagedvllm.teach import memory
from pagedvllm.teach import memory_figures as figures


def line(blocks: dict[str, list[int]], scheduled: dict[str, int], admitted: list[str], waiting: int) -> dict[str, Any]:
    return {
        "blocks": blocks,
        "scheduled": scheduled,
        "admitted_computed": dict.fromkeys(admitted, 0),
        "waiting_queue": [f"w{i}" for i in range(waiting)],
    }


TRACE = [
    line({"a": [1, 2], "b": [3]}, {"a": 5, "b": 2}, ["a", "b"], 1),
    line({"a": [1, 2], "b": [3]}, {"a": 1, "b": 1}, [], 1),
    line({"b": [3]}, {"b": 1}, [], 0),
    {"step": 3, "idle": True},
    line({"a": [1]}, {"a": 2}, ["a"], 0),  # again, after preemption: from nothing
    {"end": True},
]


def test_memory_of_a_trace() -> None:
    steps = list(memory.memory_of(TRACE))
    assert [dict(step.tokens) for step in steps] == [{"a": 5, "b": 2}, {"a": 6, "b": 3}, {"b": 4}, {"a": 2}]
    assert [step.waiting for step in steps] == [1, 1, 0, 0]


def test_token_states_by_hand() -> None:
    """Two steps count, of 4 blocks of 4: a takes 8 places and will fill 7, b takes 4 and will fill 4; 4 are free."""
    states = memory.token_states(TRACE, {"a": 7, "b": 9}, num_blocks=4, block_size=4)
    assert states == {
        "in use": (7 + 9) / 32,
        "for later": ((2 + 2) + (1 + 1)) / 32,
        "never used": (1 + 1) / 32,
        "free, nobody fits": (4 + 4) / 32,
    }
    assert sum(states.values()) == 1
    with pytest.raises(ValueError, match="nobody ever waits"):
        memory.token_states(TRACE[4:5], {"a": 9}, 4, 4)


def test_neighbours_are_drawn_in_one_piece() -> None:
    parts = [(1, 1.0), (2, 1.0), (3, 0.5), (4, 1.0), (5, 1.0), (8, 1.0)]
    assert figures._pieces(parts, columns=4) == [(1, 3, 0.5), (4, 4, 1.0), (5, 5, 1.0), (8, 8, 1.0)]


def test_workloads_repeat_and_fill_the_cache() -> None:
    lengths = memory.draw_lengths(40, seed=5)
    assert lengths == memory.draw_lengths(40, seed=5) != memory.draw_lengths(40, seed=6)
    trace, final = memory.trace_of("plain", lengths), memory.final_tokens(lengths)
    assert trace[-1]["leaked_blocks"] == 0
    stored = {name: request["num_computed_tokens"] for name, request in trace[-1]["requests"].items()}
    assert stored == final
    assert memory.token_states(trace, final, 512, 16)["in use"] > 0.8


def test_pictures_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(figures, "show", lambda fig, alt: said.append(alt))
    state = next(memory.memory_of(TRACE))
    figures.memory_map({"Paged": state}, 4, 4, follow="a", columns=4)
    figures.state_bars({"pages": memory.token_states(TRACE, {"a": 7, "b": 9}, 4, 4)})
    figures.block_picture({1: ["a0", "a1"], 2: ["b0", "."]})
    figures.mapping([5, 2], 6, 4, 7)
    assert said == [
        "Maps of the same 4 blocks at the same step, coloured by owner. Paged: 2 requests, 44% of the memory holds"
        " tokens.",
        "Where the memory goes. pages: in use 50%, for later 19%, never used 6%, free, nobody fits 25%.",
        "The blocks and what they hold. block 1: a0 a1; block 2: b0 ..",
        "6 tokens in a row, in blocks of 4. Through the block table: logical block 0 is block 5; logical block 1 is"
        " block 2.",
    ]


def test_layer_times() -> None:
    spec = AttentionSpec(0, 2, 1, 8, rotary_table({"rope_type": "default", "rope_theta": 100.0}, 8, 64))
    times = memory.layer_times(spec, (1, 16), torch.device("cpu"), requests=2, context=32)
    assert list(times) == ["contiguous", "pages of 1", "pages of 16"] and all(t > 0 for t in times.values())
