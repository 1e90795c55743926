"""Small random checkpoints of every supported family, saved by transformers itself: the oracle of the loading code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "llama-3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def save_checkpoint(path: Path, variant: str, **save: Any) -> Any:
    """Write a random checkpoint of a variant to `path`; transformers' own model of it."""
    import transformers

    family, overrides = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, value in model.named_parameters():  # transformers starts biases at 0 and norms at 1: errors would hide
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(value.data, mean=float("norm" in name), std=0.3)
    model.save_pretrained(path, **save)
    return model


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded model's directory, converted if need be."""
    from pagedvllm.hub import resolve_model

    return resolve_model("SmolLM2-135M-Instruct")
