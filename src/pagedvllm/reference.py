"""Generation at its plainest, one request at a time: the oracles of every later chapter.

Two loops that must give the same tokens. `generate_recompute` feeds the whole sequence to
the model for each new token; `generate_cached` keeps every layer's keys and values, and
feeds only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops, TorchOps
from pagedvllm.outputs import FinishReason
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sample.stopping import check_stop
from pagedvllm.sampling_params import SamplingParams


class CachedSequence:
    """One sequence and its contiguous KV cache of `capacity` tokens."""

    def __init__(
        self, model: DecoderForCausalLM, capacity: int, ops: Ops | None = None
    ) -> None:
        self.model, self.ops = model, ops or TorchOps()
        self.cache = ContiguousAttention(
            model.attention_specs(), capacity, model.build.dtype, model.build.device
        )
        self.num_computed_tokens = 0

    def forward(self, token_ids: list[int]) -> Tensor:
        """Feed the sequence's next tokens; the logits after the last one, [1, vocab]."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + len(token_ids)
        device = self.model.build.device
        positions = torch.arange(start, end, device=device)
        metadata = ContiguousMetadata(
            query_start_loc=[0, len(token_ids)],
            seq_lens=[end],
            slot_mapping=positions,
            first_slots=[0],
        )
        ctx = ForwardContext(positions, metadata, self.cache, self.ops)
        hidden = self.model(torch.tensor(token_ids, device=device), ctx)
        self.num_computed_tokens = end
        return self.model.logits(hidden[-1:])


@dataclass
class Generation:
    """One request on its way: its tokens, and what decides the next one."""

    prompt_token_ids: list[int]
    params: SamplingParams
    generator: torch.Generator
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    sampler: Sampler = field(default_factory=Sampler)
    ops: Ops = field(default_factory=TorchOps)
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def capacity(self) -> int:
        """The longest this sequence can get, in tokens."""
        longest = self.max_model_len
        if self.params.max_tokens is not None:
            longest = min(longest, len(self.prompt_token_ids) + self.params.max_tokens)
        return longest

    def append(self, logits: Tensor) -> int:
        """Choose a token from logits [1, vocab], append it, and see if it was the last."""
        row = SamplingBatch([self.params], [self.generator], [self.token_ids])
        (token,) = self.sampler(logits, row)
        self.output_token_ids.append(token)
        self.finish_reason, self.stop_reason = check_stop(
            self.prompt_token_ids,
            self.output_token_ids,
            self.params,
            self.eos_token_ids,
            self.max_model_len,
        )
        return token


def generate_recompute(model: DecoderForCausalLM, request: Generation) -> Iterator[int]:
    """Every token from scratch: each step feeds all the tokens before it."""
    while request.finish_reason is None:
        sequence = CachedSequence(model, len(request.token_ids), request.ops)
        yield request.append(sequence.forward(request.token_ids))


def generate_cached(model: DecoderForCausalLM, request: Generation) -> Iterator[int]:
    """Prefill the prompt once, then decode: each step feeds the one newest token."""
    sequence = CachedSequence(model, request.capacity, request.ops)
    token = request.append(sequence.forward(request.prompt_token_ids))  # prefill
    yield token
    while request.finish_reason is None:
        token = request.append(sequence.forward([token]))  # decode
        yield token
