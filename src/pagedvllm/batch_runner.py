"""Flat batches on a model, with a contiguous cache cut into equal stretches, the seats."""

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
    """Seat i begins at slot i * capacity; its request may grow to `capacity` tokens."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        num_seats: int,
        capacity: int,
        ops: Ops | None = None,
    ) -> None:
        self.model, self.capacity, build = model, capacity, model.build
        self.ops, self.sampler = ops or TorchOps(), Sampler()
        self.cache = ContiguousAttention(
            model.attention_specs(), num_seats * capacity, build.dtype, build.device
        )
        self.generator = torch.Generator(build.device).manual_seed(0)
        self.generators: dict[str, torch.Generator] = {}  # of running requests with a seed

    def step(self, seats: Sequence[Request | None]) -> FlatBatch:
        """Compute what each seated request lacks, all in one pass; append a token to each.

        Raises:
            ValueError: a request is longer than a seat; nothing was computed.
        """
        seated = {i: request for i, request in enumerate(seats) if request is not None}
        for request in seated.values():
            self._check(request)
        first_slots = {r.request_id: i * self.capacity for i, r in seated.items()}
        spans = [Span(r, r.num_computed_tokens, r.num_tokens) for r in seated.values()]
        batch = build_batch(spans, contiguous_slots(first_slots))
        logits = self.forward(batch, list(first_slots.values()))
        for request, token in zip(batch.sampled, self._choose(logits, batch), strict=True):
            request.num_computed_tokens = request.num_tokens
            append_token(request, token, self.capacity)
            if request.finished:
                self.generators.pop(request.request_id, None)
        return batch

    def forward(self, batch: FlatBatch, first_slots: list[int]) -> torch.Tensor:
        """The logits [R, vocab] of the R rows to sample.

        first_slots: for each sequence of the batch, the slot of its first token.
        """
        device = self.model.build.device
        token_ids = torch.tensor(batch.token_ids, device=device)
        positions = torch.tensor(batch.positions, device=device)
        slots = torch.tensor(batch.slot_mapping, device=device)
        starts, lengths = batch.query_start_loc, batch.seq_lens
        metadata = ContiguousMetadata(starts, lengths, slots, first_slots)
        ctx = ForwardContext(positions, metadata, self.cache, self.ops)
        hidden = self.model(token_ids, ctx)
        return self.model.logits(hidden[batch.sample_rows])

    def _choose(self, logits: torch.Tensor, batch: FlatBatch) -> list[int]:
        """One token for each sampled row."""
        params = [request.params for request in batch.sampled]
        histories = [request.token_ids for request in batch.sampled]
        generators = [self._generator(request) for request in batch.sampled]
        return self.sampler(logits, SamplingBatch(params, generators, histories))

    def _generator(self, request: Request) -> torch.Generator:
        """A request with a seed has a generator of its own, whoever sits beside it."""
        name, seed = request.request_id, request.params.seed
        if seed is None:
            return self.generator
        if name not in self.generators:
            self.generators[name] = torch.Generator(self.model.build.device).manual_seed(
                seed
            )
        return self.generators[name]

    def _check(self, request: Request) -> None:
        """One token too many would be written into the next seat."""
        if request.num_tokens > self.capacity:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens;"
                f" a seat holds {self.capacity}"
            )
