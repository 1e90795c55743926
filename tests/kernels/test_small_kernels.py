"""Norms, rotation, SiLU and the cache write against `TorchOps` in float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedvllm.kernels.launch import Launch, launches, recorded
from pagedvllm.kernels.ops import TritonOps
from pagedvllm.kernels.rotary import rotate_and_write
from pagedvllm.model.rotary import rotary_table
from pagedvllm.ops import TorchOps

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # relative: two roundings
TRITON, TORCH = TritonOps(), TorchOps()


def near(got: Tensor, want: Tensor, scale: float = 4.0) -> None:
    assert got.shape == want.shape and got.isfinite().all()
    eps = EPS[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=scale * eps, atol=scale * eps / 8)


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 32), (3, 48), (5, 576), (130, 16), (2, 4096)])
def test_norms(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual, weight = (randn(dtype, *shape) for shape in ((tokens, size), (tokens, size), (size,)))
    near(TRITON.rms_norm(x, weight, 1e-6), rms64(x, weight, 1e-6))
    normed, total = TRITON.add_rms_norm(x, residual, weight, 1e-6)
    near(total, x.double() + residual.double())
    if dtype != torch.bfloat16:  # the interpreter cuts bf16's bits off, where others round
        assert torch.equal(total, x + residual)
    near(normed, rms64(total, weight, 1e-6))
    assert torch.equal(normed, TRITON.rms_norm(total, weight, 1e-6))  # of the sum as it is stored


def rms64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_norm_of_the_heads_of_a_merged_projection_of_large_values_and_of_zeros() -> None:
    torch.manual_seed(0)
    q = randn(torch.float16, 5, 7 * 16)[:, 16:80].unflatten(-1, (4, 16))  # [5, 4, 16], tokens 112 apart
    weight = randn(torch.float16, 16)
    near(TRITON.rms_norm(q, weight, 1e-6), rms64(q, weight, 1e-6))
    near(TRITON.rms_norm(q.transpose(0, 1), weight, 1e-6), rms64(q.transpose(0, 1), weight, 1e-6))
    large = torch.full((2, 16), 6e4, dtype=torch.float16)  # its square is no fp16 number
    near(TRITON.rms_norm(large, weight, 1e-6), rms64(large, weight, 1e-6))
    assert torch.equal(TRITON.rms_norm(torch.zeros(2, 16), weight.float(), 1e-6), torch.zeros(2, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (3, 48), (2, 1536)])
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = randn(dtype, tokens, 2 * size) * 4
    near(TRITON.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up.double()))
    wider = randn(dtype, tokens, 2 * size + 3)[:, 3:]
    near(TRITON.silu_and_mul(wider), TORCH.silu_and_mul(wider.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_far_from_zero() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert TRITON.silu_and_mul(gate_up).tolist() == [[0.0, 200.0]]


def table(dim: int) -> Tensor:
    return rotary_table({"rope_type": "default", "rope_theta": 100.0}, dim, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (3, 3, 64), (6, 2, 80), (4, 1, 96), (2, 2, 256)])
def test_rotary(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """On the parts of a merged projection; alone, and together with the cache write."""
    torch.manual_seed(dim)
    positions, slots = torch.tensor([0, 63, 7]), torch.tensor([4, -1, 0])
    qkv = randn(dtype, 3, (heads + 2 * kv_heads) * dim).unflatten(-1, (-1, dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    want_q, want_k = TORCH.rotary(q.double(), k.double(), positions, table(dim))
    got_q, got_k = TRITON.rotary(q, k, positions, table(dim))
    near(got_q, want_q)
    near(got_k, want_k)
    k_cache, v_cache = (torch.full((6, kv_heads, dim), 9.0, dtype=dtype) for _ in "kv")
    assert torch.equal(rotate_and_write(q, k, v, positions, table(dim), k_cache, v_cache, slots), got_q)
    want = torch.full_like(k_cache, 9.0), torch.full_like(v_cache, 9.0)
    TORCH.write_cache(got_k, v, *want, slots)
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])
    assert (k_cache == 9).all(-1).all(-1).tolist() == [False, True, True, True, False, True]


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(data=st.data(), kv_heads=st.integers(1, 3), dim=st.sampled_from([2, 8, 24]), dtype=st.sampled_from(DTYPES))
def test_cache_write(data: st.DataObject, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Any slots, each at most once, but -1 as often as one likes."""
    tokens = data.draw(st.integers(1, 8))
    slots = torch.tensor(data.draw(st.permutations(range(12))))[:tokens]
    slots[torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))] = -1
    k, v = randn(dtype, tokens, 2 * kv_heads, dim).chunk(2, dim=1)
    got = [torch.full((12, kv_heads, dim), float("nan"), dtype=dtype) for _ in "kv"]
    want = [x.clone() for x in got]
    TRITON.write_cache(k, v, *got, slots)
    TORCH.write_cache(k, v, *want, slots)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_cache_write_above_two_to_the_31() -> None:
    caches = [torch.empty(2**31 // 4096 + 2, 16, 256, dtype=torch.float16) for _ in "kv"]
    k, v = randn(torch.float16, 2, 16, 256), randn(torch.float16, 2, 16, 256)
    last = len(caches[0]) - 1
    TRITON.write_cache(k, v, *caches, torch.tensor([last, -1]))
    rotate_and_write(k, k, v, torch.tensor([0, 0]), table(256), *caches, torch.tensor([-1, last - 1]))
    assert torch.equal(caches[1][last], v[0]) and torch.equal(caches[1][last - 1], v[1])
    assert torch.equal(caches[0][last], k[0]) and torch.equal(caches[0][last - 1], k[1])


def test_launches_are_counted_or_only_recorded_and_nothing_is_nothing() -> None:
    before = launches.copy()
    TRITON.silu_and_mul(torch.zeros(1, 32))
    assert launches - before == {"silu_and_mul_kernel": 1}
    assert TRITON.silu_and_mul(torch.zeros(0, 32)).shape == (0, 16)  # a batch of no tokens
    with recorded() as calls:
        TRITON.silu_and_mul(torch.zeros(3, 32, device="meta"))
    assert launches - before == {"silu_and_mul_kernel": 1}
    [call] = calls
    assert isinstance(call, Launch) and call.grid == (3, 1) and call.constants == {"SIZE": 16, "BLOCK": 16}
