"""A runner that lays its batch out anew in each step. Chapter 7.1 replaces it.

vLLM: v1/worker/gpu_model_runner.py, GPUModelRunner.execute_model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedvllm.attention.paged import (
    PagedAttentionBackend,
    PagedMetadata,
    pad_tables,
    paged_slots,
)
from pagedvllm.batch import FlatBatch, Span, build_batch
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.ops import Ops
from pagedvllm.request import Request
from pagedvllm.sample.min_tokens import MinTokens
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sched.output import ModelRunnerOutput, NewRequestData, SchedulerOutput


@dataclass
class CachedRequest:
    """What the runner remembers of a request, so that it need not be told again."""

    request: Request  # its own copy: tokens, parameters
    block_ids: list[int]
    generator: torch.Generator


class SimpleRunner:
    """SchedulerOutput -> flat batch -> logits -> tokens."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: PagedAttentionBackend,
        ops: Ops,
        limits: BatchLimits,
        seed: int,
    ) -> None:
        self.model, self.attention, self.ops = model, attention, ops
        self.block_size, self.device = limits.block_size, model.build.device
        self.sampler = Sampler([MinTokens()])
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.requests: dict[str, CachedRequest] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step's tokens and choose the next ones."""
        self.update_states(output)
        spans = [
            Span(self.requests[name].request, start, start + num_tokens)
            for name, num_tokens in output.num_scheduled_tokens.items()
            for start in (output.num_computed_tokens[name],)
        ]
        sampled: dict[str, list[int]] = {span.request.request_id: [] for span in spans}
        if spans:
            batch = build_batch(spans, self._slots_of)
            hidden = self.forward(batch, [self._table(span) for span in spans])
            for request, token in zip(
                batch.sampled, self.sample(hidden, batch), strict=True
            ):
                request.token_ids.append(token)
                sampled[request.request_id].append(token)
        return ModelRunnerOutput(list(sampled), list(sampled.values()))

    def update_states(self, output: SchedulerOutput) -> None:
        """Take in what has changed: who has ended, who is new or back, whose table grew."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.request_id] = self._remember(new)
        for name, block_ids in output.new_block_ids.items():
            self.requests[name].block_ids += block_ids

    def _remember(self, new: NewRequestData) -> CachedRequest:
        prompt, rest = new.token_ids[: new.num_prompt_tokens], new.token_ids
        request = Request(
            new.request_id, prompt, new.params, eos_token_ids=new.eos_token_ids
        )
        request.token_ids += rest[new.num_prompt_tokens :]
        known, seed = self.requests.get(new.request_id), new.params.seed
        generator = self.generator
        if known is not None:  # back from a preemption: its random stream goes on
            generator = known.generator
        elif seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        return CachedRequest(request, [], generator)

    def forward(self, batch: FlatBatch, block_tables: list[list[int]]) -> torch.Tensor:
        """Hidden states [T, hidden] of a flat batch."""

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device)

        tables, slots = pad_tables(block_tables, self.device), tensor(batch.slot_mapping)
        starts, lengths = batch.query_start_loc, batch.seq_lens
        metadata = PagedMetadata(starts, lengths, slots, tables)
        positions = tensor(batch.positions)
        context = ForwardContext(positions, metadata, self.attention, self.ops)
        return self.model(tensor(batch.token_ids), context)  # type: ignore[no-any-return]

    def sample(self, hidden: torch.Tensor, batch: FlatBatch) -> list[int]:
        """One token for each row that ends a request: no other row needs logits."""
        if not batch.sampled:
            return []
        requests = batch.sampled
        rows = SamplingBatch(
            [request.params for request in requests],
            [self.requests[request.request_id].generator for request in requests],
            [request.token_ids for request in requests],
            [request.num_prompt_tokens for request in requests],
            [request.eos_token_ids for request in requests],
        )
        return self.sampler(self.model.logits(hidden[batch.sample_rows]), rows)

    def _table(self, span: Span) -> list[int]:
        return self.requests[span.request.request_id].block_ids

    def _slots_of(self, span: Span) -> list[int]:
        return paged_slots(self._table(span), self.block_size, span.start, span.end)
