"""What a CUDA graph is, in Python: a list of operations on tensors, done again on the same memory.

It saves no time. It shows on a CPU what a graph keeps (which operations, which addresses)
and what it does not look at again (numbers and lists of the host), mistakes included.
vLLM has no counterpart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pagedvllm.worker.cuda_graph import Graph

READS_BY_HOST = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero")


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active: every operation of torch, and every kernel, in order.

    Raises:
        RuntimeError: the host asked for a number, which on a GPU it would have to wait for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).removesuffix(".default")
        by_mask = name.startswith("aten.index") and any(map(_is_mask, tree_leaves(args[1])))
        if name in READS_BY_HOST or by_mask:
            raise RuntimeError(f"{name} reads a tensor on the host: it cannot be recorded")
        result = func(*args, **kwargs)

        def again() -> None:
            # Views and what was changed in place come out where they were; the rest is moved.
            for old, new in zip(
                tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.entries.append(again)
        return result

    def launched(self, call: Any) -> None:
        """A Triton kernel, in Triton's interpreter, which itself uses torch."""
        from pagedvllm.kernels.launch import diverted, launch

        def again() -> None:
            with _disable_current_modes(), diverted(None):
                launch(call.kernel, call.grid, *call.arguments, **call.constants)

        again()
        self.entries.append(again)

    def replay(self) -> None:
        for entry in self.entries:
            entry()


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


class TapeRecorder:
    """In a CUDA graph's place: `LLM(..., cudagraph_recorder="tape")`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, function: Callable[[], Tensor]) -> Graph:
        with Tape() as tape, _kernels_too(tape):
            output = function()
        return Graph(tape.replay, output)


@contextmanager
def _kernels_too(tape: Tape) -> Iterator[None]:
    """Nobody has to have Triton: its launches go to the tape if there can be any."""
    if "pagedvllm.kernels.launch" not in sys.modules:
        yield
        return
    from pagedvllm.kernels.launch import diverted

    with diverted(tape.launched):
        yield
