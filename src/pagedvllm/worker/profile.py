"""The largest steps that the limits allow: how much memory do they need for a moment?

Two ways to know. On a GPU the steps are run and measured. Anywhere, and without any
weights, the model's own tensors can be counted on torch's `meta` device: shapes, no data.
vLLM: GPUModelRunner.profile_run and _dummy_run in v1/worker/gpu_model_runner.py.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedvllm.attention.base import AttentionMetadata, AttentionSpec
from pagedvllm.config import ModelConfig
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.model.loader import pick_dtype
from pagedvllm.ops import Ops, TorchOps
from pagedvllm.sample.sampler import draw, filtered_probs
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import NewRequestData, SchedulerOutput


def largest_steps(limits: BatchLimits) -> list[SchedulerOutput]:
    """No step within the limits needs more than one of two: all tokens in as few requests
    as they fit into, or as many requests as there may be.
    """
    tokens, longest = limits.max_num_batched_tokens, longest_computed(limits)
    few = full_step(limits, min(limits.max_num_seqs, -(-tokens // longest)))
    many = full_step(limits, min(limits.max_num_seqs, tokens))
    many.finished_req_ids = list(few.num_scheduled_tokens)
    return [few, many]


def longest_computed(limits: BatchLimits) -> int:
    """Tokens of a request that ever go through the model: the last one is only sampled."""
    return max(limits.max_model_len - 1, 1)


def full_step(limits: BatchLimits, num_seqs: int) -> SchedulerOutput:
    """As many tokens as `num_seqs` requests can have; the first is as long as can be.

    Each ends here, so that each is sampled, and from a sorted distribution. There is no
    cache yet: every block is block 0, the null block, which may hold anything.
    """
    output = SchedulerOutput(step=0)
    longest, left = longest_computed(limits), limits.max_num_batched_tokens
    for i in range(num_seqs):
        num_tokens = min(longest, left - (num_seqs - 1 - i))  # one is kept for each other
        left -= num_tokens
        length = longest if i == 0 else num_tokens
        name, params = f"profile-{i}", SamplingParams(top_p=0.9)
        new = NewRequestData(name, [0] * length, length, params, eos_token_ids=())
        output.scheduled_new_reqs.append(new)
        blocks = [0] * blocks_for(length, limits.block_size)
        output.add(name, length - num_tokens, num_tokens, blocks)
    return output


class ProfilingAttention:
    """In attention's place: gives a tensor of the right shape, reads and writes no cache.

    Left out is whatever a backend needs inside: little in a fused kernel, but a score for
    each pair of a new token and an older one in the torch backend. Only running it tells.
    """

    def forward(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> Tensor:
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        return torch.empty_like(q)


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active: bytes of the tensors that torch has made and not yet freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._storages: set[int] = set()  # ids of those that are counted in `live`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation made of others: these are counted, one by one
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
            given = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
            for tensor in _tensors(result):
                if id(tensor.untyped_storage()) not in given:  # else it is a view
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._storages:
            self._storages.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._storages.remove(key)
        self.live -= num_bytes


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def model_without_weights(
    path: Path, settings: ModelConfig, device: torch.device
) -> DecoderForCausalLM:
    """The model that `load_model` would make, with shapes and no data: it costs no memory.

    device: whose dtype "auto" stands for.
    """
    config = DecoderConfig.from_dict(json.loads((path / "config.json").read_text("utf-8")))
    build = Build(pick_dtype(settings.dtype, device), torch.device("meta"))
    longest = config.max_position_embeddings
    length = min(settings.max_model_len or longest, longest)
    return DecoderForCausalLM(config, length, build).eval()


def weight_bytes(model: DecoderForCausalLM) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.inference_mode()
def count_activations(
    model: DecoderForCausalLM, num_tokens: int, num_seqs: int, ops: Ops | None = None
) -> int:
    """Bytes of the tensors of one step at their worst moment, attention's own left out.

    num_tokens: of the flat batch. num_seqs: rows that are sampled. With a model without
    weights nothing is computed, and it takes a moment whatever the model's size.
    """
    device, rows = model.build.device, min(num_seqs, num_tokens)
    counter = AllocationCounter()
    with counter:
        token_ids, positions, slots = torch.zeros(
            3, num_tokens, dtype=torch.int64, device=device
        )
        metadata = AttentionMetadata([0, num_tokens], [num_tokens], slots)
        ctx = ForwardContext(positions, metadata, ProfilingAttention(), ops or TorchOps())
        hidden = model(token_ids, ctx)
        logits = model.logits(hidden[slots[:rows]])
        probs = filtered_probs(logits, [SamplingParams(top_p=0.9)] * rows)
        draw(probs, generators=())  # nobody needs the tokens, so nobody draws
    return counter.peak
