"""Model directories without a network: dimensions, a tokenizer of bytes, and random weights or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pagedvllm import LLM

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def without_weights(folder: Path, sizes: dict[str, Any], family: str = "Qwen3") -> Path:
    """For load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config | sizes | {"eos_token_id": 0}))
    write_tokenizer(folder)
    return folder


def of_transformers(folder: Path, sizes: dict[str, Any], device: torch.device, family: str = "Qwen3") -> Any:
    """transformers' own model with random weights, saved to `folder`: (its checkpoint is what we load)."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(0)
    with device:
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():  # they start at 0 and 1, where mistakes would not show
            if name.endswith("bias") or "norm" in name:
                value.normal_(float("norm" in name), 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder)


def runner_of(llm: LLM) -> Any:
    engine: Any = llm.engine
    return engine.core.executor.worker.runner


def trace_of(llm: LLM) -> list[dict[str, Any]]:
    """One line a step, of scheduler_cls="recording"."""
    engine: Any = llm.engine
    trace: list[dict[str, Any]] = engine.core.scheduler.trace
    return trace
