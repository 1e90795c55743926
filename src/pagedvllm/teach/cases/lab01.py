"""Lab 1: greedy decoding with a KV cache, the KV bytes of public models, top-p."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.reference import Generation, generate_recompute
from pagedvllm.sample.sampler import filtered_probs
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.teach.labs import Case, Task, same

# ---------------------------------------------------------------- 1.1 greedy decoding with a KV cache

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SHORT, LONG = [3, 14, 15, 92, 65, 35], [(7 * i * i + 3) % 101 for i in range(40)]


class TinyModel(DecoderForCausalLM):
    """A random model of 33,000 parameters that counts the rows (tokens) it is fed."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(DecoderConfig.from_dict(TINY), TINY["max_position_embeddings"])  # type: ignore[arg-type]
        self.num_rows = 0
        generator = torch.Generator().manual_seed(seed)
        for name, shape, store in self.weight_targets():
            value: Any = torch.randn(shape, generator=generator) * 0.5  # far apart logits: the same tokens everywhere
            store(value + 1.0 if "norm" in name else value)

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        self.num_rows += len(token_ids)
        return super().forward(token_ids, ctx)

    def __repr__(self) -> str:
        return "tiny model"


def reference(prompt: list[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """The right answer, by recomputing everything."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return list(generate_recompute(TinyModel(), Generation(prompt, params, torch.Generator(), tuple(eos), 128)))


def _decode_case(note: str, prompt: list[int], max_tokens: int, stop_at: int | None = None) -> Case:
    """stop_at: the index of the generated token that is made an end token, beside one that never comes."""

    def args() -> tuple[Any, ...]:
        eos = () if stop_at is None else (reference(prompt, max_tokens)[stop_at], prompt[0])
        return TinyModel(), list(prompt), max_tokens, eos

    return Case(args, note=note, check=_check_decode)


def _check_decode(got: Any, model: TinyModel, prompt: list[int], max_tokens: int, eos: tuple[int, ...]) -> str:
    expected, rows = reference(prompt, max_tokens, eos), model.num_rows
    if not same(got, expected):
        reason = f"expected {expected}, got {got!r}"
        if same(got, prompt + expected):
            reason += " (the prompt is not part of the answer)"
        elif same(got, expected[:-1]) and expected[-1] in eos:
            reason += " (the end token is part of the answer)"
        elif isinstance(got, list) and same(got[: len(expected)], expected):
            reason += " (it should have stopped)"
        return reason
    p, n = len(prompt), len(expected)
    if rows == p + n - 1:
        return ""
    reason = f"the tokens are right, but {rows} rows went through the model; with a cache it is p + n - 1 = {p + n - 1}"
    if rows == n * p + n * (n - 1) // 2 and n > 1:
        return f"{reason}. Every step fed the whole sequence again: feed only what is new"
    return f"{reason}. Nobody needs the logits after the last token" if rows == p + n else reason


# ---------------------------------------------------------------- 1.2 KV bytes

# From the models' config.json files: what decides the shape of the cache, and what DecoderConfig wants besides.
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
    },
    "Llama-3.1-70B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
}
OLD = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}  # LLaMA 7B (2023): before GQA
EMPTY = {**OLD, "num_key_value_heads": None, "head_dim": None}  # some tools write what is not set as null


def _kv_case(args: tuple[dict[str, Any], int, int], expected: int, note: str) -> Case:
    return Case(args, note=note, check=partial(_check_kv_bytes, expected=expected))


def _check_kv_bytes(got: Any, *args: Any, expected: int) -> str:
    if not same(got, expected):
        return f"expected {expected}, got {got!r}"
    if isinstance(got.tolist() if hasattr(got, "tolist") else got, float):
        return f"{got!r} is the right number, but not an integer: divide with //"
    return ""


KV_CASES = [
    _kv_case((CONFIGS["SmolLM2-135M"], 1, 4), 46_080, "SmolLM2-135M, one token in fp32"),
    _kv_case((CONFIGS["SmolLM2-135M"], 1, 2), 23_040, "SmolLM2-135M, one token in bf16"),
    _kv_case((CONFIGS["Llama-3.1-8B"], 1, 2), 131_072, "Llama-3.1-8B, one token in bf16"),
    _kv_case((CONFIGS["Llama-3.1-70B"], 8192, 2), 2_684_354_560, "Llama-3.1-70B, 8,192 tokens in bf16"),
    _kv_case((CONFIGS["Qwen2.5-7B"], 1000, 1), 28_672_000, "Qwen2.5-7B, 1,000 tokens in fp8"),
    _kv_case((CONFIGS["Qwen3-0.6B"], 1, 2), 114_688, "Qwen3-0.6B (its config states head_dim), one token in bf16"),
    _kv_case((OLD, 1, 2), 524_288, "no num_key_value_heads: one KV head for each query head"),
    _kv_case((EMPTY, 1, 2), 524_288, "num_key_value_heads and head_dim are None, which means not set"),
    _kv_case((CONFIGS["Llama-3.1-8B"], 0, 2), 0, "no tokens"),
]

# ---------------------------------------------------------------- 1.3 top-p


def _top_p_case(note: str, probs: list[float] | torch.Tensor, p: float, *, engine: bool = False) -> Case:
    original = torch.as_tensor(probs)
    return Case(lambda: (original.clone(), p), note=note, check=partial(_check_top_p, original=original, engine=engine))


def _check_top_p(got: Any, probs: torch.Tensor, p: float, *, original: torch.Tensor, engine: bool) -> str:
    """The definition of top-p, sentence by sentence: any choice between equally likely tokens is right."""
    if not isinstance(got, torch.Tensor) or got.shape != original.shape:
        return f"expected a tensor of shape {list(original.shape)}, got {getattr(got, 'shape', got)!r}"
    if not torch.equal(probs, original):
        return "the input was changed: make a new tensor"
    kept = got > 0
    if not kept.any():
        return "no token is left"
    inside, outside = original[kept], original[~kept]
    if p == 1 and len(outside):
        reason = "a running sum in fp32 is rounded and reaches 1 too early. Cut only if p < 1"
        return f"p = 1 keeps all {len(original)} tokens, here {len(outside)} are dropped: {reason}"
    total, least = inside.double().sum().item(), inside.min().item()
    if len(outside) and outside.max() > least:
        return f"dropped a token of probability {outside.max():.4f}, kept one of {least:.4f}"
    if total < p - 1e-6:
        return f"the tokens kept ({len(inside)}) sum to {total:.4f}, less than p = {p}"
    if p < 1 and len(inside) > 1 and total - least >= p:
        return f"keeps {len(inside)} tokens; all but the last of them have {total - least:.4f}, which reaches p = {p}"
    wanted = original * kept / total
    if not torch.allclose(got.float(), wanted, atol=1e-5):
        return f"expected probabilities {_some(wanted)}, got {_some(got)} (sum {got.sum():.4f})"
    if engine and not torch.allclose(got.float(), _engine(original, p), atol=1e-5):
        return "differs from the engine's filtered_probs"
    return ""


def _engine(probs: torch.Tensor, p: float) -> torch.Tensor:
    return filtered_probs(probs.log().unsqueeze(0), [SamplingParams(top_p=p)])[0]


def _some(values: torch.Tensor, limit: int = 6) -> str:
    text = ", ".join(f"{v:.4f}" for v in values[:limit].tolist())
    return f"[{text}, ...]" if len(values) > limit else f"[{text}]"


def random_probs(seed: int, size: int = 200, spread: float = 1.5) -> torch.Tensor:
    """A distribution like a model's: few likely tokens, a long tail."""
    return (spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))).double().softmax(-1).float()


TOP_P_CASES = [
    _top_p_case("sorted", [0.5, 0.25, 0.15, 0.10], 0.7),
    _top_p_case("not sorted", [0.10, 0.5, 0.15, 0.25], 0.7),
    _top_p_case("reaching p exactly is enough", [0.5, 0.25, 0.125, 0.125], 0.75),
    _top_p_case("p = 1 keeps all", [0.125, 0.5, 0.25, 0.125], 1.0),
    _top_p_case("a tiny p keeps one token", [0.25, 0.125, 0.5, 0.125], 0.001),
    _top_p_case("one token has more than p", [0.0625, 0.875, 0.0625], 0.5),
    _top_p_case("four equal tokens: any two", [0.25, 0.25, 0.25, 0.25], 0.5),
    _top_p_case("a tie at the border: one of the two", [0.25, 0.5, 0.25], 0.7),
    *(
        _top_p_case(f"200 random tokens, p = {p}", random_probs(i), p, engine=True)
        for i, p in enumerate((0.3, 0.8, 0.95))
    ),
    _top_p_case("49,152 random tokens, p = 1 keeps all", random_probs(3, 49_152, 4.0), 1.0, engine=True),
]

# ---------------------------------------------------------------- the lab

TASKS = {
    "1.1": Task(
        "Greedy decoding with a KV cache",
        [
            _decode_case("a prompt of 6, 12 tokens", SHORT, 12),
            _decode_case("a prompt of 1, 8 tokens", [5], 8),
            _decode_case("a prompt of 40, 20 tokens", LONG, 20),
            _decode_case("one token: nothing to decode", SHORT, 1),
            _decode_case("stops at an end token", SHORT, 12, stop_at=3),
            _decode_case("the first token ends it", SHORT, 12, stop_at=0),
            _decode_case("the end token comes with the last step", SHORT, 4, stop_at=3),
        ],
    ),
    "1.2": Task("KV bytes of public models", KV_CASES),
    "1.3": Task("Top-p", TOP_P_CASES),
}
