"""Where this process stands among the processes that share one model. Size 1 until chapter
10.

Paper: Shoeybi et al., "Megatron-LM", 2019, section 3. vLLM: distributed/parallel_state.py,
GroupCoordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParallelContext:
    """One tensor-parallel group. A layer asks it which shard of a weight to hold, and to
    sum partial results.
    """

    rank: int = 0
    size: int = 1

    def shard(self, name: str, length: int) -> slice:
        """This rank's part of a dimension of `length`.

        Raises:
            ValueError: `length` does not divide by the number of ranks.
        """
        if length % self.size:
            raise ValueError(
                f"{name} ({length}) does not divide by the tensor-parallel size ({self.size})"
            )
        step = length // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks: with one rank, `x` itself."""
        return x
