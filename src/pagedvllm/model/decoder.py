"""A whole decoder: token ids of a flat batch in, hidden states and logits out.

Module names are the checkpoint's, so that every weight's name says where it goes; merged
weights list their sources.
vLLM: model_executor/models/llama.py, LlamaForCausalLM (and qwen2.py, qwen3.py: the same but
for biases and head norms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.layers import MLP, Attention, Build, RMSNorm
from pagedvllm.model.linear import Linear
from pagedvllm.model.rotary import rotary_table

Target = tuple[str, torch.Size, Callable[[Tensor], object]]


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on a normed input and each added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, layer_index: int, cos_sin: Tensor, build: Build
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.self_attn = Attention(config, layer_index, cos_sin, build)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, build
        )
        self.mlp = MLP(config, build)

    def forward(
        self, x: Tensor, residual: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """x: what the layer before adds to the residual stream. Both [T, hidden]."""
        x, residual = self.input_layernorm.add(x, residual, ctx)
        x = self.self_attn(x, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual, ctx)
        return self.mlp(x, ctx), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: DecoderConfig, max_model_len: int, build: Build) -> None:
        super().__init__()
        cos_sin = rotary_table(config.rope, config.head_dim, max_model_len).to(build.device)
        table = build.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=table, _freeze=True
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, cos_sin, build) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] -> [T, hidden]."""
        residual = self.embed_tokens(token_ids)
        x = torch.zeros_like(residual)
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm.add(x, residual, ctx)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(
        self, config: DecoderConfig, max_model_len: int, build: Build | None = None
    ) -> None:
        super().__init__()
        build = build or Build()
        self.config, self.max_model_len, self.build = config, max_model_len, build
        self.model = Decoder(config, max_model_len, build)
        tied = config.tie_word_embeddings
        sizes = {"lm_head": config.vocab_size}
        self.lm_head = None if tied else build.linear(config.hidden_size, sizes)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids: [T], a flat batch -> hidden states [T, hidden]."""
        return cast("Tensor", self.model(token_ids, ctx))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden], the rows to be sampled -> [R, vocab_size] fp32."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight).float()
        return cast("Tensor", self.lm_head(hidden)).float()

    def attention_specs(self) -> list[AttentionSpec]:
        """One for each layer, in order: what a cache is built from."""
        return [m.spec for m in self.modules() if isinstance(m, Attention)]

    def weight_targets(self) -> Iterator[Target]:
        """Each tensor the checkpoint must hold: name, whole shape, and what stores it."""
        for name, module in self.named_modules():
            parent = name.rpartition(".")[0]
            if isinstance(module, Linear):
                for source, size in module.full_sizes.items():
                    yield from _linear_targets(
                        f"{parent}.{source}" if parent else source, source, size, module
                    )
            elif isinstance(weight := getattr(module, "weight", None), nn.Parameter):
                yield f"{name}.weight", weight.shape, weight.data.copy_


def _linear_targets(name: str, source: str, size: int, module: Linear) -> Iterator[Target]:
    full_in = module.in_features * (module.parallel.size if module.shard == "row" else 1)
    yield (
        f"{name}.weight",
        torch.Size((size, full_in)),
        lambda value: module.load(source, "weight", value),
    )
    if module.bias is not None:
        yield (
            f"{name}.bias",
            torch.Size((size,)),
            lambda value: module.load(source, "bias", value),
        )
