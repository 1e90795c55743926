"""Where a GPU's memory would go: the engine's own formula over numbers that need no GPU (chapter 6).

What the engine measures at its start is counted here: weights and activations on torch's meta device, which holds
shapes and no bytes; what libraries take is a number to put in. `memory_calculator` does the same arithmetic in a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from pagedvllm.attention.paged import page_bytes
from pagedvllm.config import CacheConfig, SchedulerConfig, check_choice, check_range, check_types
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.model.rotary import rotary_table
from pagedvllm.sched.limits import GIB, Device, with_defaults
from pagedvllm.worker.memory import MemorySnapshot, available_kv_bytes, requested_memory
from pagedvllm.worker.profile import count_activations, weight_bytes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
T = TypeVar("T")
Affine = tuple[int, int, int]  # bytes for each token, for each sampled row, and in any case


def _config(sizes: str, positions: int, **more: Any) -> DecoderConfig:
    """sizes: hidden, intermediate, layers, heads, KV heads and vocabulary."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    raw = dict(zip(names.split(), map(int, sizes.split()), strict=True))
    family = {"architectures": [more.pop("architecture", "LlamaForCausalLM")], "max_position_embeddings": positions}
    return DecoderConfig.from_dict({**raw, **family, **more})


# From each checkpoint's config.json on the hub: Qwen/Qwen3-0.6B, Qwen/Qwen2.5-7B-Instruct and -14B-Instruct,
# meta-llama/Llama-3.1-8B-Instruct and -70B-Instruct, HuggingFaceTB/SmolLM2-135M-Instruct. What turns the rotary
# frequencies is left out: it takes no memory.
MODELS = {
    "SmolLM2-135M": _config("576 1536 30 9 3 49152", 8192, tie_word_embeddings=True),
    "Qwen3-0.6B": _config(
        "1024 3072 28 16 8 151936", 40960, architecture="Qwen3ForCausalLM", head_dim=128, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _config("3584 18944 28 28 4 152064", 32768, architecture="Qwen2ForCausalLM"),
    "Llama-3.1-8B": _config("4096 14336 32 32 8 128256", 131072),
    "Qwen2.5-14B": _config("5120 13824 48 40 8 152064", 32768, architecture="Qwen2ForCausalLM"),
    "Llama-3.1-70B": _config("8192 28672 80 64 8 128256", 131072),
}

# GiB as torch reports them (total_memory), which is less than what is printed on the box; drivers differ by about 1%.
GPUS = {
    name: Device("cuda", name, round(gib * GIB))
    for name, gib in {
        "T4 16 GB": 14.56,
        "L4 24 GB": 22.03,
        "A10 24 GB": 22.06,
        "RTX 4090 24 GB": 23.64,
        "A100 80 GB": 79.25,
        "H100 80 GB": 79.18,
        "H200 141 GB": 139.8,
    }.items()
}


@dataclass(frozen=True)
class Needs:
    """What a model needs at one dtype, in bytes."""

    weights: int
    table: int  # of the rotary table, for each position up to max_model_len
    kv: int  # for each token in the cache
    activations: tuple[Affine, Affine]  # of the forward pass, and of sampling

    def peak(self, tokens: int, rows: int) -> int:
        """The most that activations take in a step of so many tokens, of which so many rows are sampled."""
        rows = min(rows, tokens)
        return max(a * tokens + b * rows + c for a, b, c in self.activations)


def needs_of(config: DecoderConfig, dtype: torch.dtype) -> Needs:
    """Count them on the meta device. A fused attention kernel is assumed, which keeps no scores.

    All layers are alike, and the activations of one are gone before the next one's: one layer tells.
    """
    model = DecoderForCausalLM(replace(config, num_layers=1), 1, Build(dtype, torch.device("meta")))
    layer = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    weights = weight_bytes(model) + (config.num_layers - 1) * layer
    kv = config.num_layers * page_bytes(model.attention_specs(), 1, dtype)
    return Needs(weights, rotary_table(config.rope, config.head_dim, 1).nbytes, kv, _activations(model))


def _activations(model: DecoderForCausalLM) -> tuple[Affine, Affine]:
    """Few tokens: the peak is in sampling, whose logits are wide. Many, and one sampled row: it is in the layers,
    where all is as long as the batch.
    """
    corner, token = count_activations(model, 1, 1), count_activations(model, 2, 1)
    row = count_activations(model, 2, 2)
    sampling = (token - corner, row - token, 2 * corner - row)
    return (count_activations(model, 2**14, 1) // 2**14, 0, 0), sampling


@dataclass(frozen=True)
class Settings:
    """What can be chosen, under the engine's names; amounts in bytes. None: the engine's default for model and GPU."""

    dtype: str = "bfloat16"
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    block_size: int = CacheConfig.block_size
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    non_torch: int = GIB // 10  # cuBLAS and other libraries: the engine measures it
    cuda_graphs: int = 0  # an estimate that is held back for them
    used_before: int = GIB // 2  # the CUDA context and other processes: the engine measures it

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            check_range(name, getattr(self, name), 1)
        for name in ("non_torch", "cuda_graphs", "used_before"):
            check_range(name, getattr(self, name), 0)

    def complete(self, config: DecoderConfig, gpu: Device) -> Settings:
        """With the engine's defaults instead of None."""
        length = self.max_model_len or config.max_position_embeddings
        limits = SchedulerConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)
        limits = with_defaults(limits, gpu, length)
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        return replace(self, max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=tokens)


# Why an engine does not start: first the settings, then the memory, in the order in which it is taken.
PROBLEMS = {
    "positions": "max_model_len is longer than the model's positions",
    "budget": "max_num_batched_tokens is smaller than max_num_seqs",
    "start": "less is free at the start than gpu_memory_utilization asks for",
    "weights": "the weights do not fit",
    "nothing": "no memory is left for the KV cache",
    "long": "one request of max_model_len does not fit",
}


@dataclass(frozen=True)
class Plan:
    """The parts of a card's memory, in bytes, and the blocks that come of them."""

    settings: Settings  # complete
    total: int
    requested: int  # the share that the engine may use
    weights: int  # the rotary table too
    activations: int
    available: int  # for the KV cache; below 0: so many are missing
    page_bytes: int
    num_blocks: int  # 0 where not even two fit
    problem: str  # why the engine does not start, a key of PROBLEMS; "" if it does

    @property
    def kv_cache(self) -> int:
        return self.num_blocks * self.page_bytes

    @property
    def unused(self) -> int:
        """Of the card; below 0: so many are missing."""
        s = self.settings
        return (
            self.total - s.used_before - self.weights - self.activations - s.non_torch - s.cuda_graphs - self.kv_cache
        )

    @property
    def usable_tokens(self) -> int:
        """Without block 0, the null block."""
        return max(0, self.num_blocks - 1) * self.settings.block_size

    @property
    def blocks_per_request(self) -> int:
        """Of one request of max_model_len tokens."""
        return blocks_for(self.settings.max_model_len or 1, self.settings.block_size)

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len tokens at once, as vLLM logs it: the null block counts."""
        return self.num_blocks / self.blocks_per_request


def plan(config: DecoderConfig | str, gpu: Device | str, needs: Needs | None = None, **settings: Any) -> Plan:
    """What the engine would find with a model on a GPU.

    Args:
        config, gpu: or a key of MODELS, of GPUS.
        needs: the model's, at the dtype of the settings; None: counted. For who plans many times.
        settings: fields of `Settings`.

    Raises:
        ValueError: a name is unknown, or a setting out of range.
        TypeError: a setting is unknown or ill-typed.
    """
    config = pick("model", config, MODELS) if isinstance(config, str) else config
    gpu = pick("gpu", gpu, GPUS) if isinstance(gpu, str) else gpu
    s = Settings(**settings).complete(config, gpu)
    return _plan(config, gpu, needs or needs_of(config, DTYPES[s.dtype]), s)


def _plan(config: DecoderConfig, gpu: Device, needs: Needs, s: Settings) -> Plan:
    assert s.max_model_len and s.max_num_seqs and s.max_num_batched_tokens
    requested = requested_memory(gpu.memory, s.gpu_memory_utilization)
    weights = needs.weights + needs.table * s.max_model_len
    # A request's last token is sampled, never computed: short requests may not fill the budget.
    tokens = min(s.max_num_batched_tokens, s.max_num_seqs * max(s.max_model_len - 1, 1))
    activations = needs.peak(tokens, s.max_num_seqs)
    free = gpu.memory - s.used_before
    before = MemorySnapshot(gpu.memory, free)
    after = MemorySnapshot(gpu.memory, free - weights - s.non_torch, weights, weights + activations)
    available = available_kv_bytes(requested, before, after, s.cuda_graphs)
    page = needs.kv * s.block_size
    num_blocks = available // page if available >= 2 * page else 0  # one is the null block
    problems = {
        "positions": s.max_model_len > config.max_position_embeddings,
        "budget": s.max_num_batched_tokens < s.max_num_seqs,
        "start": free < requested,
        "weights": needs.weights > free,
        "nothing": num_blocks == 0,
        "long": blocks_for(s.max_model_len, s.block_size) > num_blocks - 1,
    }
    problem = next((name for name, found in problems.items() if found), "")
    return Plan(s, gpu.memory, requested, weights, activations, available, page, num_blocks, problem)


def pick(what: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}; got {name!r}")
    return table[name]
