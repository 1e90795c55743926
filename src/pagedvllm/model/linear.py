"""Linear layers: how a weight is stored, sharded over ranks and applied, each behind a seam of its own.

A `LinearMethod` owns storage and arithmetic (quantisation and LoRA are other methods); `Linear` owns the shape and the
shard. vLLM: model_executor/layers/linear.py, LinearMethodBase, QKVParallelLinear, RowParallelLinear.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pagedvllm.parallel_context import ParallelContext

SINGLE = ParallelContext()


class LinearMethod(Protocol):
    """Stores and applies the weights of a layer."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Make the layer's parameters, uninitialised."""
        ...

    def load(self, layer: Linear, name: str, rows: slice, value: torch.Tensor) -> None:
        """Store `value`, this rank's shard, as the rows `rows` of parameter `name` ("weight" or "bias")."""
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features of this rank] -> [..., out_features of this rank], the bias not added."""
        ...


class UnquantizedMethod:
    """The weight as it is: one dense matrix, one product."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def load(self, layer: Linear, name: str, rows: slice, value: torch.Tensor) -> None:
        getattr(layer, name).data[rows].copy_(value)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight)


class Linear(nn.Module):
    """y = x W^T + b, as one matrix product for several projections of the same input (q, k and v; gate and up).

    sources: the projections' names in the checkpoint; sizes: their rows, before sharding.
    shard: "column": each rank holds a part of the rows of every projection, and its output is a part of the whole.
           "row": each rank holds a part of the columns, and the outputs are summed over the ranks.
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
        self._columns = parallel.shard("in_features", in_features) if shard == "row" else slice(0, in_features)
        self._rows = {n: parallel.shard(n, size) if shard == "column" else slice(0, size) for n, size in sizes.items()}
        self.sizes = [rows.stop - rows.start for rows in self._rows.values()]  # of this rank: to split the output by
        self.in_features, self.out_features = self._columns.stop - self._columns.start, sum(self.sizes)
        device = device or torch.device("cpu")
        self.method.create(self, dtype, device)
        value = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.bias = nn.Parameter(value, requires_grad=False) if value is not None else None

    def load(self, source: str, name: str, value: torch.Tensor) -> None:
        """Store the checkpoint's tensor `source`.`name` (unsharded) in its rows of the merged parameter."""
        value = value[self._rows[source]]
        if name == "weight":
            value = value[:, self._columns]
        first = sum(self.sizes[: list(self.full_sizes).index(source)])
        self.method.load(self, name, slice(first, first + len(value)), value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.method.apply(self, x)
        if self.shard == "row":
            y = self.parallel.all_reduce(y)
        return y if self.bias is None else y + self.bias  # after the sum: every rank holds a row layer's whole bias
