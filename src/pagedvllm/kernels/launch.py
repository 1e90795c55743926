"""How a kernel is started: where it may run, and a count that proves it did.

Paper: Tillet et al., "Triton", MAPL 2019. vLLM: triton_utils/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "attention_backend 'triton' and ops 'triton' need the package triton, which is not"
        " installed (there is none for macOS); 'torch' runs everywhere",
        name="triton",
    ) from error

__all__ = [
    "INTERPRETED",
    "Launch",
    "check_device",
    "diverted",
    "launch",
    "launches",
    "padded",
    "recorded",
    "tl",
    "triton",
]

# Whether kernels run in Triton's interpreter, on the CPU: decided where they are decorated.
INTERPRETED: bool = triton.knobs.runtime.interpret

launches: Counter[str] = Counter()  # kernel name -> how often it was started


@dataclass(frozen=True)
class Launch:
    """One start of a kernel: a program for each point of the grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # tensors and numbers, in the kernel's order
    constants: dict[str, Any]  # tl.constexpr parameters; num_warps, num_stages


_divert: Callable[[Launch], None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel. A grid without a point starts nothing.

    The first argument is a tensor: where it lies, and its dtype, must suit Triton.
    """
    if _divert is not None:
        _divert(Launch(kernel, grid, arguments, constants))
    elif 0 not in grid:
        check_device(arguments[0].device, arguments[0].dtype)
        kernel[grid](*arguments, **constants)
        launches[kernel.fn.__name__] += 1


@contextmanager
def diverted(to: Callable[[Launch], None] | None) -> Iterator[None]:
    """What is launched inside is handed to `to`, and not run; None: it is run."""
    global _divert
    before, _divert = _divert, to
    try:
        yield
    finally:
        _divert = before


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched inside is written down, and not run: tensors may be on "meta"."""
    calls: list[Launch] = []
    with diverted(calls.append):
        yield calls


@cache
def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError, saying what to set, if kernels do not run there in `dtype`."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "device 'cpu' runs Triton kernels in Triton's interpreter only: set"
            " TRITON_INTERPRET=1 before Python starts, or choose attention_backend='torch'"
            " and ops='torch'"
        )
    if dtype != torch.bfloat16 or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        major, minor = capability
        raise ValueError(
            f"dtype bfloat16 needs compute capability 8.0, {device} has {major}.{minor}:"
            " choose dtype='float16'"
        )


def padded(size: int) -> int:
    """The next power of two: the only sizes that a tensor inside a kernel can have."""
    return int(triton.next_power_of_2(size))
