"""Linear layers: how a weight is stored, sharded over ranks and applied.

A `LinearMethod` owns storage and arithmetic (quantisation and LoRA are other methods);
`Linear` owns the shape and the shard.
vLLM: model_executor/layers/linear.py, LinearMethodBase, QKVParallelLinear, RowParallelLinear.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedvllm.parallel_context import ParallelContext

SINGLE = ParallelContext()


class LinearMethod(Protocol):
    """Stores and applies the weights of a layer."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Make the layer's parameters, uninitialised."""
        ...

    def load(self, layer: Linear, name: str, rows: slice, value: Tensor) -> None:
        """Store this rank's shard in `rows` of the parameter `name`, "weight" or "bias"."""
        ...

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """x: [..., this rank's in_features] -> [..., its out_features]; no bias yet."""
        ...


class UnquantizedMethod:
    """The weight as it is: one dense matrix, one product."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layer.out_features, layer.in_features)
        weight = torch.empty(shape, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def load(self, layer: Linear, name: str, rows: slice, value: Tensor) -> None:
        getattr(layer, name).data[rows].copy_(value)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)


class Linear(nn.Module):
    """y = x W^T + b: one matrix product for several projections (q, k, v; gate, up).

    sizes: each projection's name in the checkpoint, and its rows in the whole model.
    shard: "column": each rank holds a part of every projection's rows, and its output is a
        part of the whole. "row": each holds a part of the columns, and outputs are summed.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        sizes: dict[str, int],
        *,
        bias: bool = False,
        shard: Literal["column", "row", "none"] = "none",
        parallel: ParallelContext = SINGLE,
        method: LinearMethod | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.shard, self.parallel = shard, parallel
        self.method: LinearMethod = method or UnquantizedMethod()
        self.full_sizes = sizes
        self._columns, self._rows = slice(0, in_features), dict[str, slice]()
        if shard == "row":
            self._columns = parallel.shard("in_features", in_features)
        for name, size in sizes.items():
            whole = slice(0, size)
            self._rows[name] = parallel.shard(name, size) if shard == "column" else whole
        # This rank's: the output is split by `sizes`.
        self.sizes = [rows.stop - rows.start for rows in self._rows.values()]
        self.in_features = self._columns.stop - self._columns.start
        self.out_features = sum(self.sizes)
        device = device or torch.device("cpu")
        self.method.create(self, dtype, device)
        value = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.bias = nn.Parameter(value, requires_grad=False) if value is not None else None

    def load(self, source: str, name: str, value: Tensor) -> None:
        """Store the checkpoint's whole tensor `source`.`name`: this rank's part of it."""
        value = value[self._rows[source]]
        if name == "weight":
            value = value[:, self._columns]
        first = sum(self.sizes[: list(self.full_sizes).index(source)])
        self.method.load(self, name, slice(first, first + len(value)), value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.method.apply(self, x)
        if self.shard == "row":
            y = self.parallel.all_reduce(y)
        if self.bias is not None:
            y = y + self.bias  # after the sum: every rank holds a row layer's whole bias
        return y
