"""What chapter 7.1's helpers say: counted writes, notes by hand, times, and figures with alt text."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from pagedvllm.attention.paged import paged_slots
from pagedvllm.batch import Span, build_batch
from pagedvllm.engine.simple_runner import SimpleRunner
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.request import Request
from pagedvllm.sched.output import SchedulerOutput
from pagedvllm.teach import runner_figures as figures
from pagedvllm.teach import runners
from pagedvllm.worker.model_runner import ModelRunner


@pytest.fixture
def alts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alt texts of the figures that are shown; drawing them is part of the test."""
    from pagedvllm.teach import style

    said: list[str] = []

    def show(fig: Any, alt: str) -> None:
        style.svg(fig)  # raises if a text is too small
        said.append(alt)

    monkeypatch.setattr(figures, "show", show)
    return said


def test_notes_grow_every_request_by_one_token_and_blocks_as_needed() -> None:
    notes = list(islice(runners.decode_steps(3, context=15, block_size=4), 4))
    assert [len(note.scheduled_new_reqs) for note in notes] == [3, 0, 0, 0]
    assert [set(note.num_computed_tokens.values()) for note in notes] == [{14}, {15}, {16}, {17}]
    blocks = [len(note.new_block_ids["r0"]) for note in notes]
    assert blocks == [4, 0, 1, 0]  # 15, 16, 17, 18 tokens
    ids = [block for note in notes for new in note.new_block_ids.values() for block in new]
    assert len(set(ids)) == len(ids) and 0 not in ids


@pytest.mark.parametrize("kind", [SimpleRunner, ModelRunner])
def test_both_runners_take_the_notes(kind: Any) -> None:
    runner = runners.without_model(kind, BatchLimits(3, 3, 32, 4))
    for note in islice(runners.decode_steps(3, context=15, block_size=4), 6):
        assert runner.execute(note).sampled == [[0]] * 3


def test_host_times_are_of_each_kind() -> None:
    times = runners.host_times({"rebuilt": SimpleRunner, "persistent": ModelRunner}, 2, context=40)
    assert list(times) == ["rebuilt", "persistent"] and all(0 < ms < 1e4 for ms in times.values())


def test_rebuilding_costs_by_the_length_of_contexts_and_keeping_does_not() -> None:
    kinds = {"rebuilt": SimpleRunner, "persistent": ModelRunner}
    short, long = (runners.host_times(kinds, 16, context=n) for n in (64, 16384))
    assert long["rebuilt"] / short["rebuilt"] > 3 * long["persistent"] / short["persistent"]


def test_writes_are_counted_and_placed() -> None:
    runner = runners.without_model(ModelRunner, BatchLimits(2, 8, 8, 4))
    writes = runners.Writes(runner)
    note = SchedulerOutput(1, scheduled_new_reqs=[runners.new_request("a", [7] * 3)])
    note.add("a", 0, 3, [5])
    runner.execute(note)
    rows = writes.rows()
    assert (rows.names, rows.num_tokens, rows.tables) == (["a"], [4], [[5]])
    assert rows.tokens_written.tolist() == [[True] * 4 + [False] * 4, [False] * 8]
    assert rows.num_written == 4 + 1 + 1 + 1  # tokens, their number, a block, the number of blocks
    note = SchedulerOutput(2)
    note.add("a", 3, 1, [])
    runner.execute(note)
    assert writes.rows().num_written == 2
    note = SchedulerOutput(3, finished_req_ids=["a"])
    runner.execute(note)
    rows = writes.rows()
    assert rows.names == [] and rows.blocks_written[0, 0] and not rows.tokens_written.any()


def test_a_cut_of_a_watched_array_is_not_watched() -> None:
    array = np.zeros((2, 2), int).view(runners.Watched)
    array.written = np.zeros((2, 2), bool)
    array[0, 1] = 3
    copy = array[[0, 1]]
    copy[1, 1] = 4
    assert array.written.tolist() == [[False, True], [False, False]]


def test_the_figure_of_a_step_says_all_its_arrays(alts: list[str]) -> None:
    spans = [Span(Request("A", [0] * 9), 4, 7), Span(Request("B", [0] * 6), 5, 6)]
    tables = {"A": [5, 2], "B": [3, 7]}
    batch = build_batch(spans, lambda s: paged_slots(tables[s.request.request_id], 4, s.start, s.end))
    figures.flat_batch(batch, [[5, 2], [3, 7]], ["A: a chunk", "B"])
    (said,) = alts
    assert "positions [4, 5, 6, 5]; slot_mapping [8, 9, 10, 29]" in said
    assert "query_start_loc [0, 3, 4]; logits_at [3]; seq_lens [7, 6]" in said


def test_the_figure_of_rows(alts: list[str]) -> None:
    runner = runners.without_model(ModelRunner, BatchLimits(2, 8, 8, 4))
    writes, steps = runners.Writes(runner), {}
    for note in islice(runners.decode_steps(2, context=3, block_size=4), 3):
        runner.execute(note)
        steps[f"step {note.step}"] = writes.rows()
    figures.rows_over_steps(steps)
    assert alts[0].endswith("step 2: rows r0, r1, 4 numbers written; step 3: rows r0, r1, 8 numbers written.")


def test_the_figure_of_times(alts: list[str]) -> None:
    curves = {1: {"slow": 0.1, "fast": 0.2}, 64: {"slow": 3.0, "fast": 0.3}}
    figures.host_time(curves, curves, fixed=(1000, 64))
    assert "at 64 requests slow 3.00 ms, fast 0.30 ms" in alts[0]


def test_the_figure_of_touched_memory_names_what_is_wrong(alts: list[str]) -> None:
    figures.touched([0] * 4, [0, 1, 1, 0], {1: 0, 3: 1}, block_size=2)
    assert alts == [
        "The slots of the cache that the kernel wrote: token 0 in slot 1, token 1 in slot 3. Wrong: [2, 3]."
    ]
