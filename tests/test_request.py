"""Requests as state machines, and the flat batch."""

from __future__ import annotations

import pytest

from pagedvllm.batch import Span, build_batch, contiguous_slots
from pagedvllm.request import FINISH_REASONS, TRANSITIONS, Request, RequestStatus
from pagedvllm.sampling_params import SamplingParams

S = RequestStatus


def at(status: RequestStatus) -> Request:
    request = Request("a", [1, 2, 3])
    request._status = status
    return request


def test_the_twelve_states_are_vllms() -> None:
    assert [s.name for s in S] == [
        "WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ",
        "RUNNING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_IGNORED",
        "FINISHED_ERROR", "FINISHED_REPETITION",
    ]  # fmt: skip
    assert [s for s in S if s.finished] == [s for s in S if s > S.PREEMPTED] == list(FINISH_REASONS)
    assert FINISH_REASONS[S.FINISHED_IGNORED] == "length"


@pytest.mark.parametrize("old", list(S))
@pytest.mark.parametrize("new", list(S))
def test_only_legal_transitions(old: RequestStatus, new: RequestStatus) -> None:
    request = at(old)
    if new in TRANSITIONS[old]:
        request.status = new
        assert request.status is new
    else:
        with pytest.raises(ValueError, match=f"cannot go from {old.name} to {new.name}"):
            request.status = new
        assert request.status is old


def test_what_no_life_contains() -> None:
    for old, new in [
        (S.WAITING, S.PREEMPTED),
        (S.PREEMPTED, S.WAITING),
        (S.RUNNING, S.RUNNING),
        (S.WAITING_FOR_REMOTE_KVS, S.RUNNING),
        (S.FINISHED_ABORTED, S.WAITING),
        (S.FINISHED_STOPPED, S.FINISHED_ABORTED),
    ]:
        assert new not in TRANSITIONS[old]
    assert all(not TRANSITIONS[s] for s in S if s.finished)
    assert all(S.FINISHED_ABORTED in TRANSITIONS[s] for s in S if not s.finished)


def test_one_token_list() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt)
    request.token_ids += [7, 8]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)
    assert request.output_token_ids == [7, 8] and prompt == [1, 2, 3]
    assert request.finish_reason is None and not request.finished
    other = Request("c", [4, 5], SamplingParams(max_tokens=2))
    prompt, output = other._prompt, other._output
    assert list(prompt) == [4, 5] and list(output) == [] and prompt[-1] == 5
    with pytest.raises(IndexError):
        output[-1]
    assert other.append(6, 99) is None and other.append(7, 99) == "length"
    assert list(prompt) == [4, 5] and list(output) == output[0:] == [6, 7] and output[-1] == 7 and len(output) == 2
    with pytest.raises(ValueError, match="'b': prompt_token_ids is empty"):
        Request("b", [])


def test_flat_batch_of_prefill_chunk_and_decode() -> None:
    whole, chunked, decoding = Request("w", [10, 11, 12]), Request("c", list(range(20, 30))), Request("d", [30, 31])
    decoding.token_ids += [32, 33]
    spans = [Span(whole, 0, 3), Span(chunked, 4, 8), Span(decoding, 3, 4)]
    batch = build_batch(spans, contiguous_slots({"w": 0, "c": 100, "d": 200}))
    assert batch.token_ids == [10, 11, 12, 24, 25, 26, 27, 33]
    assert batch.positions == [0, 1, 2, 4, 5, 6, 7, 3]
    assert batch.slot_mapping == [0, 1, 2, 104, 105, 106, 107, 203]
    assert batch.query_start_loc == [0, 3, 7, 8] and batch.seq_lens == [3, 8, 4] and batch.num_tokens == 8
    assert batch.sample_rows == [2, 7] and batch.sampled == [whole, decoding]  # the chunk's next token is known
    assert build_batch([], contiguous_slots({})).query_start_loc == [0]
