"""Requests in order of arrival, one at a time, through a reference loop: the engine of the first chapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedvllm.config import OPS, EngineConfig
from pagedvllm.detokenizer import IncrementalDetokenizer
from pagedvllm.hub import resolve_model
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops
from pagedvllm.outputs import CompletionOutput, RequestOutput
from pagedvllm.plugins import load_plugins, resolve
from pagedvllm.reference import Generation, generate_cached, generate_recompute
from pagedvllm.sample.sampler import Sampler
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.tokenizer import Tokenizer


class ReferenceEngine:
    """Requests in order of arrival, one at a time, with a contiguous KV cache."""

    loop = staticmethod(generate_cached)
    supported = frozenset(
        {"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos"}
        | {"detokenize", "skip_special_tokens"}
    )

    def __init__(self, config: EngineConfig) -> None:
        config.refuse_unused("model")
        load_plugins()
        self.config = config
        path = resolve_model(config.model.model, need_weights=config.model.load_format != "dummy")
        self.tokenizer = Tokenizer(path)
        self.model = load_model(path, config.model, pick_device(config.model.device))
        ops: type[Ops] = resolve(OPS.get(config.ops, config.ops), Ops)  # type: ignore[type-abstract]
        self.ops, self.sampler = ops(), Sampler()
        self.generator = torch.Generator(self.model.build.device).manual_seed(config.model.seed)
        self._waiting: dict[str, tuple[str | None, Generation]] = {}  # in order of arrival; the first one is running
        self._running: tuple[Iterator[int], IncrementalDetokenizer] | None = None

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def add_request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue a request. Raises ValueError, naming the field, if this engine cannot do what it asks."""
        params.refuse_unsupported(self.supported, self.config.engine)
        if request_id in self._waiting:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
        generator = self.generator
        if params.seed is not None:
            generator = torch.Generator(self.model.build.device).manual_seed(params.seed)
        eos, longest = self.tokenizer.eos_token_ids, self.max_model_len
        request = Generation(prompt_token_ids, params, generator, eos, longest, self.sampler, self.ops)
        self._waiting[request_id] = (prompt, request)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def abort_request(self, request_id: str) -> None:
        """Forget a request. An id that is not (or no longer) here is fine: it may just have finished."""
        if next(iter(self._waiting), None) == request_id:
            self._running = None
        self._waiting.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Advance the first request by one token; its output so far."""
        if not self._waiting:
            return []
        request_id, (prompt, request) = next(iter(self._waiting.items()))
        if self._running is None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, request.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens
            )
            self._running = (self.loop(self.model, request), detokenizer)
        tokens, detokenizer = self._running
        token = next(tokens)
        if request.params.detokenize:
            detokenizer.add([token])
        if request.finish_reason is not None:
            detokenizer.finish()
            self.abort_request(request_id)
        completion = CompletionOutput(
            0, detokenizer.text, list(request.output_token_ids), request.finish_reason, request.stop_reason
        )
        finished = request.finish_reason is not None
        return [RequestOutput(request_id, prompt, request.prompt_token_ids, [completion], finished)]


class RecomputeEngine(ReferenceEngine):
    """The same without a cache."""

    loop = staticmethod(generate_recompute)
