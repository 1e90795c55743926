"""The engine of the first chapters: one request after the other, in a reference loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedvllm.config import OPS, EngineConfig
from pagedvllm.detokenizer import IncrementalDetokenizer, text_tokens
from pagedvllm.hub import resolve_model
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops
from pagedvllm.outputs import CompletionOutput, RequestOutput
from pagedvllm.plugins import load_plugins, resolve_from
from pagedvllm.reference import Generation, generate_cached, generate_recompute
from pagedvllm.sample.sampler import Sampler
from pagedvllm.sampling_params import BASIC_FIELDS, SamplingParams
from pagedvllm.tokenizer import Tokenizer


class ReferenceEngine:
    """Requests in order of arrival, one at a time, with a contiguous KV cache."""

    loop = staticmethod(generate_cached)

    def __init__(self, config: EngineConfig) -> None:
        config.refuse_unused("model")
        load_plugins()
        self.config = config
        dummy = config.model.load_format == "dummy"
        path = resolve_model(config.model.model, need_weights=not dummy)
        self.tokenizer = Tokenizer(path)
        self.model = load_model(path, config.model, pick_device(config.model.device))
        self.ops = resolve_from(OPS, config.ops, Ops)()  # type: ignore[type-abstract]
        self.sampler = Sampler()
        self.generator = self._generator(config.model.seed)
        # Request id -> (prompt, request) in order of arrival; the first one is running.
        self._waiting: dict[str, tuple[str | None, Generation]] = {}
        self._running: tuple[Iterator[int], IncrementalDetokenizer] | None = None

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        """Queue a request. Raises ValueError, by name, for what this engine cannot do."""
        params.refuse_unsupported(BASIC_FIELDS, self.config.engine)
        if request_id in self._waiting:
            raise ValueError(f"request_id {request_id!r} is used by an unfinished request")
        seeded = params.seed is not None
        generator = self._generator(params.seed) if seeded else self.generator
        eos, longest = self.tokenizer.eos_token_ids, self.max_model_len
        request = Generation(
            prompt_token_ids, params, generator, eos, longest, self.sampler, self.ops
        )
        self._waiting[request_id] = (prompt, request)

    def _generator(self, seed: int | None) -> torch.Generator:
        return torch.Generator(self.model.build.device).manual_seed(seed or 0)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def abort_request(self, request_id: str) -> None:
        """Forget a request. An unknown id is fine: the request may just have finished."""
        if next(iter(self._waiting), None) == request_id:
            self._running = None
        self._waiting.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Advance the first request by one token; its output so far."""
        if not self._waiting:
            return []
        request_id, (prompt, request) = next(iter(self._waiting.items()))
        if self._running is None:
            self._running = (self.loop(self.model, request), self._detokenizer(request))
        tokens, detokenizer = self._running
        new, params = [next(tokens)], request.params
        detokenizer.add(text_tokens(new, request.finish_reason, params))
        finished = request.finish_reason is not None
        if finished:
            detokenizer.finish()
            self.abort_request(request_id)
        output = CompletionOutput(0, detokenizer.text, list(request.output_token_ids))
        output.finish_reason, output.stop_reason = (
            request.finish_reason,
            request.stop_reason,
        )
        ids = request.prompt_token_ids
        return [RequestOutput(request_id, prompt, ids, [output], finished)]

    def _detokenizer(self, request: Generation) -> IncrementalDetokenizer:
        prompt, params = request.prompt_token_ids, request.params
        return IncrementalDetokenizer.of(self.tokenizer, prompt, params)


class RecomputeEngine(ReferenceEngine):
    """The same without a cache."""

    loop = staticmethod(generate_recompute)
