"""The flat batch: the new tokens of many sequences in one row, one after the other, without padding.

A prompt of 500 tokens, a chunk of another prompt and thirty single decode tokens are one forward pass of 530-odd rows.
vLLM: v1/worker/gpu_model_runner.py, GPUModelRunner._prepare_inputs. The idea: Yu et al., "Orca", OSDI 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedvllm.request import Request


class Span(NamedTuple):
    """The tokens of one request that a step computes: token_ids[start:end]."""

    request: Request
    start: int
    end: int


SlotsOf = Callable[[Span], Iterable[int]]  # where in the cache the keys and values of a span's tokens go


@dataclass
class FlatBatch:
    """T tokens of S sequences. Sequence i owns the rows query_start_loc[i] to query_start_loc[i + 1] - 1."""

    token_ids: list[int] = field(default_factory=list)  # T
    positions: list[int] = field(default_factory=list)  # T: the place of each token in its own sequence
    slot_mapping: list[int] = field(default_factory=list)  # T: where its key and value are stored
    query_start_loc: list[int] = field(default_factory=lambda: [0])  # S + 1
    seq_lens: list[int] = field(default_factory=list)  # S: tokens in the cache once the batch is computed
    sample_rows: list[int] = field(default_factory=list)  # the rows whose logits choose a next token
    sampled: list[Request] = field(default_factory=list)  # the request that each of those rows belongs to

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(spans: Sequence[Span], slots_of: SlotsOf) -> FlatBatch:
    """Lay the spans out one after the other.

    A row is sampled only where a span reaches the end of its request: within a prompt the next token is known.
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
    """Slots of requests that each own one stretch of the cache, beginning at first_slots[request_id]."""

    def slots(span: Span) -> range:
        first = first_slots[span.request.request_id]
        return range(first + span.start, first + span.end)

    return slots
