"""Scheduler, KV-cache manager and model in one plain loop: `LLM(model, engine="paged")`.

vLLM: v1/engine/core.py, EngineCore.step. Here all is in one process, and the batch is laid out
anew in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch

from pagedvllm.attention.paged import (
    PagedAttentionBackend,
    PagedMetadata,
    pad_tables,
    page_bytes,
    paged_slots,
)
from pagedvllm.batch import FlatBatch, Span, build_batch
from pagedvllm.config import ATTENTION_BACKENDS, KV_MANAGERS, OPS, SCHEDULERS, EngineConfig
from pagedvllm.detokenizer import IncrementalDetokenizer, text_tokens
from pagedvllm.forward_context import ForwardContext
from pagedvllm.hub import resolve_model
from pagedvllm.kv.protocol import KVCache
from pagedvllm.kv.sizing import bytes_by_hand, num_kv_blocks, useful_blocks
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops
from pagedvllm.outputs import CompletionOutput, RequestOutput
from pagedvllm.plugins import load_plugins, resolve_from
from pagedvllm.request import Request
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sampling_params import BASIC_FIELDS, SamplingParams
from pagedvllm.sched.limits import Device, with_defaults
from pagedvllm.sched.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from pagedvllm.sched.scheduler import Scheduler
from pagedvllm.tokenizer import Tokenizer


@dataclass
class _Client:
    """What the engine keeps for a request besides what the scheduler does."""

    request: Request
    prompt: str | None
    generator: torch.Generator
    detokenizer: IncrementalDetokenizer


class PagedEngine:
    """Many requests at once over a paged KV cache."""

    def __init__(self, config: EngineConfig) -> None:
        config.refuse_unused("model", "cache", "scheduler", "attention")
        load_plugins()
        self.config = config
        dummy = config.model.load_format == "dummy"
        path = resolve_model(config.model.model, need_weights=not dummy)
        self.tokenizer = Tokenizer(path)
        self.model = load_model(path, config.model, pick_device(config.model.device))
        self.device = self.model.build.device
        self.ops = resolve_from(OPS, config.ops, Ops)()  # type: ignore[type-abstract]
        self.sampler = Sampler()
        self.generator = torch.Generator(self.device).manual_seed(config.model.seed)
        self._clients: dict[str, _Client] = {}
        self._arrivals = count()
        self._make_memory(config)

    def _make_memory(self, config: EngineConfig) -> None:
        """The pool, who hands out its blocks, who decides about them, and the cache itself."""
        limits = with_defaults(
            config.scheduler, Device.of(self.device), self.model.max_model_len
        )
        block_size, self.max_model_len = config.cache.block_size, self.model.max_model_len
        specs, dtype = self.model.attention_specs(), self.model.build.dtype
        page = page_bytes(specs, block_size, dtype)
        useful = useful_blocks(limits.max_num_seqs or 1, self.max_model_len, block_size)
        available = bytes_by_hand(config.cache, useful * page, f"engine {config.engine!r}")
        num_blocks = num_kv_blocks(config.cache, available, page)
        if (
            config.model.max_model_len is None
        ):  # not asked for: what the pool can hold will do
            self.max_model_len = min(self.max_model_len, (num_blocks - 1) * block_size)
        manager = resolve_from(KV_MANAGERS, config.cache.manager, KVCache)  # type: ignore[type-abstract]
        kv = manager(num_blocks, block_size)
        scheduler = resolve_from(SCHEDULERS, config.scheduler.scheduler_cls, Scheduler)
        self.scheduler = scheduler(limits, kv, self.max_model_len)
        name = config.attention.attention_backend
        backend = resolve_from(ATTENTION_BACKENDS, name, PagedAttentionBackend)  # type: ignore[type-abstract]
        self.attention = backend(specs, num_blocks, block_size, dtype, self.device)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        """Queue a request. ValueError, naming the field, if this engine cannot do it."""
        params.refuse_unsupported(BASIC_FIELDS, self.config.engine)
        now, eos = float(next(self._arrivals)), self.tokenizer.eos_token_ids
        request = Request(request_id, prompt_token_ids, params, now, eos_token_ids=eos)
        self.scheduler.add_request(request)
        generator = self.generator
        if params.seed is not None:
            generator = torch.Generator(self.device).manual_seed(params.seed)
        detokenizer = IncrementalDetokenizer.of(self.tokenizer, prompt_token_ids, params)
        self._clients[request_id] = _Client(request, prompt, generator, detokenizer)

    def abort_request(self, request_id: str) -> None:
        """Forget a request. An unknown id is fine: it may just have finished."""
        self.scheduler.finish_requests([request_id])
        self._clients.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._clients)

    def step(self) -> list[RequestOutput]:
        """Run the model once over what the scheduler chose; outputs of who got a token."""
        output = self.scheduler.schedule()
        try:
            result = self.execute(output)
        except BaseException:
            self.scheduler.retract(output)
            raise
        changes = self.scheduler.update(output, result)
        return [self._report(c) for c in changes if c.request_id in self._clients]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the model on one step's tokens and choose the next ones."""
        spans = []
        for request_id, start in output.num_computed_tokens.items():
            end = start + output.num_scheduled_tokens[request_id]
            spans.append(Span(self.scheduler.requests[request_id], start, end))
        tokens: dict[str, list[int]] = {span.request.request_id: [] for span in spans}
        if spans:
            batch = build_batch(spans, self._slots_of)
            tables = pad_tables([self._table(span) for span in spans], self.device)
            hidden = self.forward(batch, tables)
            rows = SamplingBatch(
                [request.params for request in batch.sampled],
                [self._clients[request.request_id].generator for request in batch.sampled],
                [request.token_ids for request in batch.sampled],
            )
            if batch.sampled:
                chosen = self.sampler(self.model.logits(hidden[batch.sample_rows]), rows)
                for request, token in zip(batch.sampled, chosen, strict=True):
                    tokens[request.request_id].append(token)
        return ModelRunnerOutput(list(tokens), list(tokens.values()))

    def forward(self, batch: FlatBatch, block_tables: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] of a flat batch."""

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device)

        slots, starts = tensor(batch.slot_mapping), batch.query_start_loc
        metadata = PagedMetadata(starts, batch.seq_lens, slots, block_tables)
        positions = tensor(batch.positions)
        context = ForwardContext(positions, metadata, self.attention, self.ops)
        return self.model(tensor(batch.token_ids), context)  # type: ignore[no-any-return]

    def _table(self, span: Span) -> list[int]:
        return self.scheduler.kv.block_ids(span.request.request_id)

    def _slots_of(self, span: Span) -> list[int]:
        block_size = self.config.cache.block_size
        return paged_slots(self._table(span), block_size, span.start, span.end)

    def _report(self, change: EngineCoreOutput) -> RequestOutput:
        """A request's output so far, as the caller sees it."""
        client = self._clients[change.request_id]
        request, detokenizer = client.request, client.detokenizer
        finished = change.finish_reason is not None
        new, reason = change.new_token_ids, change.finish_reason
        detokenizer.add(text_tokens(new, reason, request.params))
        if finished:
            detokenizer.finish()
            del self._clients[change.request_id]
        text, tokens = detokenizer.text, request.output_token_ids
        completion = CompletionOutput(
            0, text, tokens, change.finish_reason, change.stop_reason
        )
        name, prompt_ids = change.request_id, request.token_ids[: request.num_prompt_tokens]
        return RequestOutput(
            name, client.prompt, prompt_ids, [completion], finished, change.error
        )
