"""Seats, static and continuous; flat batches on a real (tiny) model; the cost model against counted operations."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pagedvllm.batch import Span, build_batch, contiguous_slots
from pagedvllm.batch_runner import BatchRunner
from pagedvllm.batching import admit_continuous, admit_static, append_token, serve
from pagedvllm.reference import Generation, generate_recompute
from pagedvllm.request import Request, RequestStatus
from pagedvllm.roofline import Machine, decode_batch, matrix_sizes, measure_machine, step_cost
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.teach.cases.lab01 import TinyModel

BOTH = [admit_static, admit_continuous]


def ask(lengths, arrivals=(), prompt=(1,), **params):
    arrivals = [*arrivals, *[0] * len(lengths)]
    return [
        Request(str(i), list(prompt), SamplingParams(max_tokens=n, ignore_eos=True, **params), arrivals[i])
        for i, n in enumerate(lengths)
    ]


def pretend(seats):
    for request in filter(None, seats):
        append_token(request, 7, longest=10_000)


def plan(lengths, num_seats, admit, arrivals=()):
    steps = serve(ask(lengths, arrivals), num_seats, admit, pretend)
    return " ".join("".join("." if r is None else r.request_id for r in seats) for seats in steps)


# ---------------------------------------------------------------- seats


@pytest.mark.parametrize(
    ("admit", "expected"), [(admit_static, "01 0. 0. 0. 23 2."), (admit_continuous, "01 02 02 03")]
)
def test_who_sits_where(admit, expected):
    assert plan([4, 1, 2, 1], 2, admit) == expected


@pytest.mark.parametrize(("admit", "expected"), [(admit_static, "01 0. 0. 2."), (admit_continuous, "01 02 0.")])
def test_a_late_request(admit, expected):
    assert plan([3, 1, 1], 2, admit, [0, 0, 1]) == expected


def test_nobody_there_yet_and_nobody_at_all():
    assert plan([1], 2, admit_continuous, [2]) == ".. .. 0."
    assert list(serve([], 2, admit_continuous, pretend)) == []


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=20)


@given(lengths, st.integers(1, 5), st.data())
def test_any_list_of_requests(lengths, num_seats, data):
    """Each gets its tokens in one seat without a break; continuous batching leaves no seat idle while anyone waits."""
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths)))
    counts = {}
    for admit in BOTH:
        requests = ask(lengths, arrivals)
        steps = list(serve(requests, num_seats, admit, pretend))
        counts[admit] = len(steps)
        assert [r.num_output_tokens for r in requests] == lengths
        assert all(r.status is RequestStatus.FINISHED_LENGTH_CAPPED for r in requests)
        for request, length in zip(requests, lengths, strict=True):
            cells = [(t, s) for t, seats in enumerate(steps) for s, who in enumerate(seats) if who is request]
            assert len(cells) == length and len({seat for _, seat in cells}) == 1
            assert all(b == a + 1 for (a, _), (b, _) in pairwise(cells)) and cells[0][0] >= request.arrival_time
            if admit is admit_continuous:
                waited = steps[int(request.arrival_time) : cells[0][0]]
                assert all(None not in seats for seats in waited)
    assert counts[admit_continuous] <= counts[admit_static]


def test_admission_leaves_the_rest_of_the_line():
    seats, waiting = [None, None], deque(ask([1, 1, 1]))
    admit_static(seats, waiting)
    assert [r.request_id for r in waiting] == ["2"]
    assert all(r is not None and r.status is RequestStatus.RUNNING for r in seats)
    seats[0] = None
    admit_static(seats, waiting)
    assert seats[0] is None and len(waiting) == 1
    admit_continuous(seats, waiting)
    assert seats[0] is not None and not waiting


# ---------------------------------------------------------------- on a model


def reference(request):
    """By recomputing everything, alone."""
    generator = torch.Generator().manual_seed(request.params.seed or 0)
    alone = Generation(request.token_ids, request.params, generator, request.eos_token_ids, 48)
    return list(generate_recompute(TinyModel(), alone))


def crowd(**params):
    draw = random.Random(0)
    requests = []
    for i in range(9):
        prompt = [draw.randrange(100) for _ in range(draw.randint(1, 20))]
        requests += ask([draw.randint(1, 12)], prompt=prompt, seed=i, **params)
        requests[-1].request_id = str(i)
    return requests


@pytest.mark.parametrize("admit", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_same_tokens_as_one_by_one(admit, temperature):
    requests = crowd(temperature=temperature)
    expected = [reference(request) for request in requests]
    runner, rows = BatchRunner(TinyModel(), num_seats=3, capacity=48), []

    def step(seats):
        batch = runner.step(seats)
        rows.append((batch.num_tokens, len(batch.seq_lens)))

    steps = list(serve(requests, 3, admit, step))
    assert [request.output_token_ids for request in requests] == expected
    assert any(tokens > sequences > 1 for tokens, sequences in rows)  # a prompt shared a pass with others
    assert len(steps) < sum(map(len, expected))
    assert runner.generators == {}


def test_a_request_that_stops_at_an_end_token_leaves_its_seat():
    first, second = ask([12], prompt=[3, 14, 15]), ask([2], prompt=[5])
    end = reference(first[0])[3]
    request = Request("a", [3, 14, 15], SamplingParams(temperature=0, max_tokens=12), eos_token_ids=(end,))
    greedy = Request("b", second[0].token_ids, SamplingParams(temperature=0, max_tokens=2))
    expected = [reference(request), reference(greedy)]
    runner = BatchRunner(TinyModel(), 1, 32)
    steps = list(serve([request, greedy], 1, admit_continuous, runner.step))
    assert [request.output_token_ids, greedy.output_token_ids] == expected
    assert request.status is RequestStatus.FINISHED_STOPPED and len(steps) == sum(map(len, expected))


def test_a_seat_ends_a_sequence_and_refuses_one_that_is_too_long():
    request = Request("a", [1] * 6, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
    runner = BatchRunner(TinyModel(), 2, 8)
    list(serve([request], 2, admit_continuous, runner.step))
    assert request.num_tokens == 8 and request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    long = Request("b", [1] * 9)
    with pytest.raises(ValueError, match="request 'b' has 9 tokens; a seat holds 8"):
        runner.step([None, long])
    assert runner.model.num_rows == 7  # 6 of the prompt and one decode step: nothing of the second


# ---------------------------------------------------------------- what a step costs


def test_the_cost_is_what_torch_counts():
    """Decode steps exactly. Of a prompt our attention computes the half above the diagonal, too, and masks it."""
    model = TinyModel()
    heads = model.config.num_layers * model.config.num_heads * model.config.head_dim
    for lengths_, new in [([5, 9, 2], [1, 1, 1]), ([7, 12], [7, 1]), ([10, 3, 8], [4, 3, 1])]:
        # (For a sequence of one token torch multiplies the weights by 1 without counting it.)
        requests = [Request(str(i), [1] * n) for i, n in enumerate(lengths_)]
        spans = [Span(r, r.num_tokens - n, r.num_tokens) for r, n in zip(requests, new, strict=True)]
        batch = build_batch(spans, contiguous_slots({str(i): 16 * i for i in range(3)}))
        with FlopCounterMode(display=False) as counter:
            BatchRunner(model, 3, 16).forward(batch, [16 * i for i in range(len(spans))])
        masked = sum(n * (n - 1) // 2 for n in new)
        assert counter.get_total_flops() == step_cost(model.config, batch, 4).flops + 4 * heads * masked


def test_bytes_of_a_step():
    model = TinyModel()
    matrices = sum(p.numel() for n, p in model.named_parameters() if "norm" not in n and "embed" not in n)
    cost = step_cost(model.config, decode_batch(3, 10), 2)
    assert sum(matrix_sizes(model.config)) == matrices and cost.weight_bytes == 2 * matrices
    assert cost.kv_bytes == 3 * 10 * model.config.kv_bytes_per_token(2)
    assert cost.num_bytes == cost.weight_bytes + cost.kv_bytes
    one = step_cost(model.config, decode_batch(1, 10), 2)
    assert (cost.flops, cost.weight_bytes) == (3 * one.flops, one.weight_bytes)


def test_a_step_waits_for_the_slower_of_the_two():
    cost = step_cost(TinyModel().config, decode_batch(4, 10), 4)
    assert cost.seconds(Machine(1e9, 1e15)) == cost.num_bytes / 1e9
    assert cost.seconds(Machine(1e15, 1e9)) == cost.flops / 1e9
    assert Machine(2.0, 10.0).knee == 5.0 and cost.intensity == cost.flops / cost.num_bytes


def test_this_machine_has_a_knee():
    machine = measure_machine(torch.device("cpu"), torch.float32)
    assert machine.bytes_per_second > 1e8 and machine.flops_per_second > 1e8 and machine.knee > 0.3
