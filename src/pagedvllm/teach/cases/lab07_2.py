"""Lab 7.2: three puzzles in Triton, the last of which is a paged decode kernel that runs inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedMetadata
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.forward_context import ForwardContext
from pagedvllm.teach.helpers import device
from pagedvllm.teach.kernel_cases import PagedCase, paged_case, tiny_model
from pagedvllm.teach.labs import Case, Task

NAN = float("nan")


def _where() -> torch.device:
    return torch.device(device().split()[0])


# ---------------------------------------------------------------- did a kernel run?


_started = 0


@cache
def count_launches() -> None:
    """From now on `_started` counts the kernels that are started, the reader's own included."""
    from triton.runtime.jit import KernelInterface

    interface: Any = KernelInterface
    before = interface.__getitem__

    def getitem(self: Any, grid: Any) -> Any:
        global _started
        _started += 1
        return before(self, grid)

    interface.__getitem__ = getitem


class Kernel:
    """A case whose answer must start a kernel, and come near to a float64 result."""

    def __init__(self, make: Callable[[], tuple[Any, ...]], expected: Callable[..., Tensor], limit: float) -> None:
        self.make, self.expected, self.limit = make, expected, limit

    def arguments(self) -> tuple[Any, ...]:
        global _started
        count_launches()
        _started = 0
        return self.make()

    def check(self, got: Any, *args: Any) -> str:
        if not isinstance(got, Tensor):
            return f"expected a tensor, got {type(got).__name__}"
        want = self.expected(*args)
        if got.shape != want.shape:
            return f"expected shape {list(want.shape)}, got {list(got.shape)}"
        if not _started:
            return "no kernel was started: torch did the work"
        if got.isnan().any():
            return f"{int(got.isnan().sum())} numbers are NaN: read or used what is nobody's, or left out unwritten"
        error = float((got.double() - want).abs().max())
        return "" if error <= self.limit else f"off by up to {error:.2g}, at most {self.limit:g} is rounding"


def _case(note: str, make: Callable[[], tuple[Any, ...]], expected: Callable[..., Tensor], limit: float = 1e-5) -> Case:
    kernel = Kernel(make, expected, limit)
    return Case(kernel.arguments, note=note, check=kernel.check)


def guarded(numbers: Tensor) -> Tensor:
    """The same numbers, with NaN in the memory right behind them."""
    buffer = torch.full((numbers.numel() + 64,), NAN, dtype=numbers.dtype, device=_where())
    inside = buffer[: numbers.numel()].view(numbers.shape)
    inside.copy_(numbers)
    return inside


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---------------------------------------------------------------- 7.2.1 one pass


def _rows(rows: int, n: int, change: Callable[[Tensor], Any] | None = None) -> tuple[Tensor]:
    x = _random(rows, n)
    if change:
        change(x)
    return (guarded(x),)


def _first_tile_hidden(x: Tensor) -> None:
    x[:, :16] = float("-inf")


def _lse(x: Tensor) -> Tensor:
    return torch.logsumexp(x.double(), 1)


LSE_CASES = [
    _case("one tile", partial(_rows, 1, 16), _lse),
    _case("three tiles", partial(_rows, 2, 48), _lse),
    _case("a last tile that is not full", partial(_rows, 3, 37), _lse),
    _case("a single number", partial(_rows, 2, 1), _lse),
    _case("scores of 100 and more", partial(_rows, 2, 40, lambda x: x.add_(100)), _lse, 1e-4),
    _case("the largest comes last", partial(_rows, 2, 40, lambda x: x[:, -1].fill_(50)), _lse, 1e-4),
    _case("a whole tile of -inf comes first", partial(_rows, 2, 40, _first_tile_hidden), _lse),
]

# ---------------------------------------------------------------- 7.2.2 a product in tiles


def _matrices(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return guarded(_random(m, k)), guarded(_random(n, k))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double().T


DOT_CASES = [
    _case("one tile", partial(_matrices, 16, 16, 16), _product),
    _case("four tiles of the result", partial(_matrices, 32, 32, 16), _product),
    _case("the sum in three parts", partial(_matrices, 16, 16, 48), _product, 1e-4),
    _case("a result that fills no tile", partial(_matrices, 5, 7, 16), _product),
    _case("a sum that fills no tile", partial(_matrices, 16, 16, 9), _product),
    _case("nothing fits", partial(_matrices, 19, 33, 21), _product),
]

# ---------------------------------------------------------------- 7.2.3 paged decode


def _decodes(lengths: list[int], heads: int = 4, kv_heads: int = 2, block_size: int = 4, dim: int = 16) -> PagedCase:
    """Sequences that decode their last token, in blocks in a scattered order; the rest of the cache is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    total = sum(counts)
    order = [1 + (7 * i) % (total if total % 7 else total + 1) for i in range(total)]
    tables = [[order.pop() for _ in range(count)] for count in counts]
    return paged_case([(n - 1, 1) for n in lengths], tables, heads, kv_heads, dim, block_size)


def _decode_case(note: str, **case: Any) -> Case:
    def make() -> tuple[Any, ...]:
        c = _decodes(**case)
        lengths = torch.tensor(c.lengths, dtype=torch.int32, device=c.q.device)
        return c.q, c.k_cache, c.v_cache, c.tables, lengths, c.scale

    return _case(note, make, lambda *_: _decodes(**case).expected)


DECODE_CASES = [
    _decode_case("one sequence, one full block", lengths=[4]),
    _decode_case("a last block that is not full", lengths=[6]),
    _decode_case("a single token", lengths=[1]),
    _decode_case("three sequences of different lengths", lengths=[9, 1, 12]),
    _decode_case("every query head has its own KV head", lengths=[7], heads=2, kv_heads=2),
    _decode_case("six query heads on two KV heads", lengths=[5, 3], heads=6, kv_heads=2),
    _decode_case("blocks of 16", lengths=[35, 16], block_size=16),
    _decode_case("head size 32", lengths=[10], dim=32),
]

Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


class ReadersAttention(TorchPagedAttention):
    """Steps of single tokens go through the reader's `decode`; all others as in chapter 4."""

    decode: Decode
    calls = 0

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        if len(meta.seq_lens) < len(q):
            return super().forward(spec, q, k, v, ctx)
        k_cache, v_cache = self.caches[spec.layer_index]
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        ctx.ops.write_cache(k, v, k_cache.flatten(0, 1), v_cache.flatten(0, 1), meta.slot_mapping)
        lengths = torch.tensor(meta.seq_lens, dtype=torch.int32, device=q.device)
        ReadersAttention.calls += 1
        return type(self).decode(q, k_cache, v_cache, meta.block_tables, lengths, spec.scale)


def in_engine(decode: Decode) -> str:
    """Run a small engine whose decode steps use `decode`, and the same engine without: what came out, in words."""
    from pagedvllm import LLM, SamplingParams, teach

    ReadersAttention.decode, ReadersAttention.calls = staticmethod(decode), 0
    model = tiny_model()
    tokens = []
    for backend in (f"{__name__}:ReadersAttention", "torch"):
        small = {"load_format": "dummy", "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 16}
        llm = LLM(model, **teach.chapter("7.2"), **small, attention_backend=backend)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        try:
            outputs = llm.generate([[11, 22, 33], [44] * 6], params)
        except NotImplementedError:
            return "not attempted"
        tokens.append([output.outputs[0].token_ids for output in outputs])
    same = "same tokens" if tokens[0] == tokens[1] else f"other tokens: {tokens[0]} instead of {tokens[1]}"
    return f"{same}, {ReadersAttention.calls} calls of decode"


# ---------------------------------------------------------------- the lab

TASKS = {
    "7.2.1": Task("One pass over a row", LSE_CASES),
    "7.2.2": Task("A product in tiles", DOT_CASES),
    "7.2.3": Task("Paged decode", DECODE_CASES),
}
