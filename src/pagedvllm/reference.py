"""Generation at its plainest, one request at a time: the slow paths, kept as the oracles of every later chapter.

Two loops that must give the same tokens. `generate_recompute` feeds the whole sequence to the model for each new token;
`generate_cached` keeps every layer's keys and values, and feeds only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
from pagedvllm.config import OPS, EngineConfig
from pagedvllm.detokenizer import IncrementalDetokenizer
from pagedvllm.forward_context import ForwardContext
from pagedvllm.hub import resolve_model
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.loader import load_model, pick_device
from pagedvllm.ops import Ops, TorchOps
from pagedvllm.outputs import CompletionOutput, FinishReason, RequestOutput
from pagedvllm.plugins import load_plugins, resolve
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sample.stopping import check_stop
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.tokenizer import Tokenizer


class Sequence:
    """One sequence and its contiguous KV cache of `capacity` tokens."""

    def __init__(self, model: DecoderForCausalLM, capacity: int, ops: Ops | None = None) -> None:
        self.model, self.ops = model, ops or TorchOps()
        self.cache = ContiguousAttention(model.attention_specs(), capacity, model.build.dtype, model.build.device)
        self.num_computed_tokens = 0

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        """Feed the next tokens of the sequence; the logits that follow the last of them, [1, vocab]."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + len(token_ids)
        device = self.model.build.device
        positions = torch.arange(start, end, device=device)
        metadata = ContiguousMetadata(
            query_start_loc=[0, len(token_ids)], seq_lens=[end], slot_mapping=positions, first_slots=[0]
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

    def append(self, logits: torch.Tensor) -> int:
        """Choose a token from logits [1, vocab], append it, and see whether the request is finished."""
        (token,) = self.sampler(logits, SamplingBatch([self.params], [self.generator], [self.token_ids]))
        self.output_token_ids.append(token)
        num_output, num_tokens = len(self.output_token_ids), len(self.token_ids)
        self.finish_reason, self.stop_reason = check_stop(
            token, num_output, num_tokens, self.params, self.eos_token_ids, self.max_model_len
        )
        return token


def generate_recompute(model: DecoderForCausalLM, request: Generation) -> Iterator[int]:
    """Every token from scratch: step i feeds all the tokens before it, so n tokens cost about n * n / 2 rows."""
    while request.finish_reason is None:
        sequence = Sequence(model, len(request.token_ids), request.ops)
        yield request.append(sequence.forward(request.token_ids))


def generate_cached(model: DecoderForCausalLM, request: Generation) -> Iterator[int]:
    """Prefill the prompt once, then decode: each step feeds the one newest token."""
    sequence = Sequence(model, request.capacity, request.ops)
    token = request.append(sequence.forward(request.prompt_token_ids))  # prefill
    yield token
    while request.finish_reason is None:
        token = request.append(sequence.forward([token]))  # decode
        yield token


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
        path = resolve_model(config.model.model)
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
