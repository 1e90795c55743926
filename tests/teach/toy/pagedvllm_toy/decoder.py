"""Takes names from another module in several ways."""

from __future__ import annotations

import torch
from torch import nn

from pagedvllm_toy.layers import EPS, REGISTRY, RMSNorm, relu, rms_norm
from pagedvllm_toy.layers import rope_table as table

NORMS = {"rms": rms_norm, "table": table}
HOOKS = [table]


class FancyNorm(RMSNorm):
    """A subclass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Decoder(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = FancyNorm(4)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def table_size(n: int) -> float:
    return len(table(n)) + (EPS if EPS > 0.5 else 0)


def table_size_by_registry(n: int) -> int:
    return len(NORMS["table"](n)) + len(HOOKS[0](n))


def activate(x: float) -> float:
    return relu(x) + REGISTRY["relu"](x)
