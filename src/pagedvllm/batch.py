"""The flat batch: the new tokens of many sequences, one after the other, without padding.

A prompt of 500 tokens, a chunk of another prompt and thirty single decode tokens are one
forward pass of 530-odd rows. The idea: Yu et al., "Orca", OSDI 2022.
vLLM: v1/worker/gpu_model_runner.py, GPUModelRunner._prepare_inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pagedvllm.request import Request


@dataclass(frozen=True)
class Span:
    """The tokens of one request that a step computes: token_ids[start:end]."""

    request: Request
    start: int
    end: int


SlotsOf = Callable[[Span], Iterable[int]]  # where keys and values of a span's tokens go


@dataclass
class FlatBatch:
    """T tokens of S sequences, R of which get a next token.

    Sequence i owns the rows query_start_loc[i] to query_start_loc[i + 1] - 1.
    """

    token_ids: list[int] = field(default_factory=list)  # T
    positions: list[int] = field(
        default_factory=list
    )  # T: each token's place in its sequence
    slot_mapping: list[int] = field(default_factory=list)  # T: where its key and value go
    query_start_loc: list[int] = field(default_factory=lambda: [0])  # S + 1
    seq_lens: list[int] = field(
        default_factory=list
    )  # S: how long each sequence is by then
    sample_rows: list[int] = field(default_factory=list)  # R: rows whose logits are needed
    sampled: list[Request] = field(default_factory=list)  # R: the requests they belong to

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(spans: Sequence[Span], slots_of: SlotsOf) -> FlatBatch:
    """Lay the spans out one after the other.

    A row is sampled only where a span reaches the end of its request: inside a prompt the
    next token is known.
    """
    batch = FlatBatch()
    for span in spans:
        batch.token_ids += span.request.token_ids[span.start : span.end]
        batch.positions += range(span.start, span.end)
        batch.slot_mapping += slots_of(span)
        batch.query_start_loc.append(len(batch.token_ids))
        batch.seq_lens.append(span.end)
        if span.end == span.request.num_tokens:
            batch.sample_rows.append(len(batch.token_ids) - 1)
            batch.sampled.append(span.request)
    return batch


def contiguous_slots(first_slots: dict[str, int]) -> SlotsOf:
    """For requests that each own one stretch of the cache, from first_slots[id] on."""

    def slots(span: Span) -> range:
        first = first_slots[span.request.request_id]
        return range(first + span.start, first + span.end)

    return slots
