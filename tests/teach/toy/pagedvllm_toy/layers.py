"""Functions and modules that another module imports by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EPS = 1e-6
LIMIT = 1e-6  # equal to EPS, and another constant
PROMPT = """one
  two"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def banner(name: str) -> str:
    """Say hello.

    Twice.
    """
    text = f"""hello
  {name}
bye"""
    return text


class RMSNorm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight)


@functools.lru_cache(maxsize=8)
def rope_table(n: int) -> list[int]:
    return list(range(n))


def make_scaler(factor: float) -> Callable[[float], float]:
    def scale(x: float) -> float:
        return x * factor

    return scale


double = make_scaler(2.0)

REGISTRY: dict[str, Any] = {}


def register(name: str) -> Callable[[Any], Any]:
    def put(thing: Any) -> Any:
        REGISTRY[name] = thing
        return thing

    return put


@register("relu")
def relu(x: float) -> float:
    return max(x, 0.0)


@register("Gate")
class Gate:
    """A registered class."""

    def open(self) -> bool:
        return False


def times(n: int) -> Callable[[Callable[[], int]], Callable[[], int]]:
    def decorate(f: Callable[[], int]) -> Callable[[], int]:
        def wrapper() -> int:
            return n * f()

        return wrapper

    return decorate


twice = times(2)


@twice
def one() -> int:
    return 1


@twice
def ten() -> int:
    return 10


FROZEN = (rope_table,)
