"""Rotary position embedding: by which angle each pair of a head's dimensions is turned.

Paper: Su et al., "RoFormer", 2021. The scaled variants are defined by transformers'
modeling_rope_utils, which checkpoints are made against.
vLLM: model_executor/layers/rotary_embedding/.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rotary_table(settings: dict[str, Any], head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] fp32: the cosines of head_dim / 2 angles, then their sines.

    Raises:
        ValueError: the rope type is unknown, or a setting of it is missing.
    """
    frequencies = _frequencies(settings, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(settings: dict[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] radians per position: from 1 down to about 1 / theta."""
    theta = float(settings["rope_theta"])
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / head_dim)
    kind = settings["rope_type"]
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _setting(settings, "factor")
    if kind == "llama3":
        return _llama3(frequencies, settings)
    raise ValueError(
        f"rope_type: {kind!r} is not supported; supported: default, linear, llama3"
    )


def _llama3(frequencies: Tensor, settings: dict[str, Any]) -> Tensor:
    """Llama 3.1's long context: slow frequencies are divided by `factor`, fast ones kept,
    those between blended.
    """
    factor = _setting(settings, "factor")
    low = _setting(settings, "low_freq_factor")
    high = _setting(settings, "high_freq_factor")
    context = _setting(settings, "original_max_position_embeddings")
    turns = context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: fewer than `low` turns
    return keep * frequencies + (1 - keep) * frequencies / factor


def _setting(settings: dict[str, Any], name: str) -> float:
    if name not in settings:
        raise ValueError(f"rope_type {settings['rope_type']!r} needs the setting {name}")
    return float(settings[name])
