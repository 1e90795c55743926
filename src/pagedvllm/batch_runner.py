"""Runs flat batches on a model whose contiguous cache is cut into equal stretches, one for each seat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
from pagedvllm.batch import FlatBatch, Span, build_batch, contiguous_slots
from pagedvllm.batching import append_token
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops, TorchOps
from pagedvllm.request import Request
from pagedvllm.sample.sampler import Sampler, SamplingBatch


class BatchRunner:
    """Seat i of the cache begins at slot i * capacity, and whoever sits there may grow to `capacity` tokens."""

    def __init__(self, model: DecoderForCausalLM, num_seats: int, capacity: int, ops: Ops | None = None) -> None:
        self.model, self.capacity = model, capacity
        self.ops, self.sampler = ops or TorchOps(), Sampler()
        build = model.build
        self.cache = ContiguousAttention(model.attention_specs(), num_seats * capacity, build.dtype, build.device)
        self.generator = torch.Generator(build.device).manual_seed(0)
        self.generators: dict[str, torch.Generator] = {}  # of running requests that have a seed of their own

    def step(self, seats: Sequence[Request | None]) -> FlatBatch:
        """Compute what is missing of every seated request and append a token to each. One pass for all of them."""
        spans, first_slots = [], {}
        for seat, request in enumerate(seats):
            if request is not None:
                self._check(request)
                spans.append(Span(request, request.num_computed_tokens, request.num_tokens))
                first_slots[request.request_id] = seat * self.capacity
        batch = build_batch(spans, contiguous_slots(first_slots))
        logits = self.forward(batch, list(first_slots.values()))
        params, histories = [r.params for r in batch.sampled], [r.token_ids for r in batch.sampled]
        rows = SamplingBatch(params, [self._generator(r) for r in batch.sampled], histories)
        for request, token in zip(batch.sampled, self.sampler(logits, rows), strict=True):
            request.num_computed_tokens = request.num_tokens
            append_token(request, token, self.capacity)
            if request.finished:
                self.generators.pop(request.request_id, None)
        return batch

    def forward(self, batch: FlatBatch, first_slots: list[int]) -> torch.Tensor:
        """The logits [R, vocab] of the R rows to sample. first_slots: where each sequence's stretch begins."""
        token_ids, positions, slots = (
            torch.tensor(values, device=self.model.build.device)
            for values in (batch.token_ids, batch.positions, batch.slot_mapping)
        )
        metadata = ContiguousMetadata(batch.query_start_loc, batch.seq_lens, slots, first_slots)
        hidden = self.model(token_ids, ForwardContext(positions, metadata, self.cache, self.ops))
        return self.model.logits(hidden[batch.sample_rows])

    def _check(self, request: Request) -> None:
        """One token too many would be written into the next seat's stretch."""
        if request.num_tokens > self.capacity:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens; a seat holds {self.capacity}"
            )

    def _generator(self, request: Request) -> torch.Generator:
        """A request with a seed draws from a generator of its own, whoever sits beside it."""
        name, seed = request.request_id, request.params.seed
        if seed is None:
            return self.generator
        if name not in self.generators:
            self.generators[name] = torch.Generator(self.model.build.device).manual_seed(seed)
        return self.generators[name]
