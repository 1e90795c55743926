"""From a Hugging Face directory to a model in memory: exact names, nothing missing, nothing
left over.

vLLM: model_executor/model_loader/ (DefaultModelLoader, DummyModelLoader).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pagedvllm.config import ModelConfig
from pagedvllm.hub import weight_files
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.model.linear import LinearMethod, UnquantizedMethod
from pagedvllm.parallel_context import ParallelContext


def load_model(
    path: Path,
    settings: ModelConfig,
    device: torch.device,
    parallel: ParallelContext | None = None,
    method: LinearMethod | None = None,
) -> DecoderForCausalLM:
    """The model of the checkpoint directory `path`, on `device`.

    Raises:
        ValueError: config.json asks for something unsupported, max_model_len is longer than
            the model's positions, or the checkpoint's tensors are not exactly those of its
            architecture.
    """
    raw = json.loads((path / "config.json").read_text("utf-8"))
    config = DecoderConfig.from_dict(raw)
    length = settings.max_model_len or config.max_position_embeddings
    if length > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(
            f"max_model_len must be at most {limit} (max_position_embeddings of {path.name}), got {length}"
        )
    build = Build(
        pick_dtype(settings.dtype, device),
        device,
        parallel or ParallelContext(),
        method or UnquantizedMethod(),
    )
    model = DecoderForCausalLM(config, length, build)
    if settings.load_format == "dummy":
        fill_dummy(model, settings.seed)
    else:
        load_weights(model, path)
    return model.eval()


def pick_device(name: str) -> torch.device:
    """The device that "auto" stands for: PAGEDVLLM_DEVICE, else a GPU where there is one,
    else the CPU.
    """
    if name == "auto":
        name = os.environ.get("PAGEDVLLM_DEVICE") or (
            "cuda" if torch.cuda.is_available() else "cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no CUDA device")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: fp32 on a CPU; on a GPU bf16 from compute
    capability 8.0 on, else fp16.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type != "cuda":
        return torch.float32
    return (
        torch.bfloat16
        if torch.cuda.get_device_capability(device) >= (8, 0)
        else torch.float16
    )


def load_weights(model: DecoderForCausalLM, path: Path) -> None:
    """Copy every tensor of the checkpoint to its place. Any name or shape that does not
    match is an error, named.
    """
    targets = {name: (shape, store) for name, shape, store in model.weight_targets()}
    for name, value in read_tensors(path):
        if name not in targets:
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and model.lm_head is None
            ):
                continue  # computed, or the same matrix as the embedding
            raise ValueError(
                f"{path.name}: tensor {name} is not part of {model.config.architecture}"
            )
        shape, store = targets.pop(name)
        if value.shape != shape:
            raise ValueError(
                f"{path.name}: tensor {name} has shape {list(value.shape)}, expected {list(shape)}"
            )
        store(value)
    if targets:
        first = min(targets)
        raise ValueError(f"{path.name}: tensor {first} is missing ({len(targets)} in all)")


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the checkpoint's safetensors files."""
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


def fill_dummy(model: DecoderForCausalLM, seed: int) -> None:
    """Random weights that depend on `seed` alone, drawn on the CPU in fp32 and in the order
    of `weight_targets`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape, store in model.weight_targets():
        value: Any = torch.randn(shape, generator=generator) * 0.02
        store(value + 1.0 if "norm" in name else value)
