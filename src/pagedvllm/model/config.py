"""A checkpoint's config.json, read into the few numbers that a decoder is built from.

vLLM: config/model.py and transformers' PretrainedConfig; here only what the dense
Llama-like families need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama. None: `attention_bias` of config.json says."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False  # a norm on each head of q and k, before the rotation


ARCHITECTURES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Sizes count elements, not bytes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]  # as `rope_settings` gives it
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes that one token's keys and values take, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DecoderConfig:
        """From the contents of config.json.

        Raises:
            ValueError: a key is missing, or asks for something these decoders do not do;
                the message names the key.
        """
        architecture = (raw.get("architectures") or ["(none)"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"architectures: {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported(raw)
        family = ARCHITECTURES[architecture]
        attention_bias = bool(raw.get("attention_bias", False))
        heads = _positive(raw, "num_attention_heads")
        kv_heads = _positive(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads ({heads}) does not divide by num_key_value_heads ({kv_heads})"
            )
        hidden = _positive(raw, "hidden_size")
        if raw.get("head_dim") is None and hidden % heads:
            raise ValueError(
                f"hidden_size ({hidden}) does not divide by num_attention_heads ({heads})"
            )
        return cls(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_positive(raw, "head_dim", hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_positive(raw, "max_position_embeddings"),
            rope=rope_settings(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
        )


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """All in one dict, as transformers 5 has it, also from `rope_theta` and `rope_scaling`."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings["rope_type"] = (
        settings.pop("type", None) or settings.get("rope_type") or "default"
    )
    settings.setdefault("rope_theta", raw.get("rope_theta") or 10_000.0)
    return settings


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {raw['hidden_act']!r} is not supported, only 'silu'")
    layer_types = raw.get("layer_types") or []
    if raw.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise ValueError("use_sliding_window: sliding-window attention is not supported")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config: quantized checkpoints are not supported")
    partial = (raw.get("rope_parameters") or raw).get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor: {partial} is not supported, only 1.0")


def _positive(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name} is missing from config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value
