"""The paged attention kernel and its split form against float64, in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.kernels import attention_plan
from pagedvllm.kernels.attention_plan import Card, TileShape, num_splits, plan_attention, tile_shape
from pagedvllm.kernels.launch import launches
from pagedvllm.kernels.paged_attention import paged_attention
from tests.kernels.support import CPU, Paged, assert_near, paged

pytestmark = [  # a split without keys; a padded row
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
]
MIXED = [(0, 1), (0, 17), (31, 1), (16, 16), (5, 3), (32, 1), (40, 9)]  # (computed, new)


def run(case: Paged, **plan: int) -> torch.Tensor:
    shape = case.q.shape
    return paged_attention(case.q, case.k_cache, case.v_cache, case.tables, case.plan(**plan), 1 / math.sqrt(shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    case = paged([(0, 1), (5, 3), (32, 1), (16, 16)], dim=dim, dtype=dtype)
    assert_near(run(case), case.expected)


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    """A tile of 32 keys holds many pages, a part of one, or the end of one and the start of the next."""
    case = paged([*MIXED, (127, 2), (130, 1)], block_size=block_size, heads=2, kv_heads=1, dim=16)
    assert_near(run(case), case.expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (9, 3), (14, 2), (16, 1), (40, 1)])
def test_query_heads_that_share_a_kv_head(heads: int, kv_heads: int) -> None:
    """Also groups that do not divide the tile's rows: what is left over belongs to nobody."""
    case = paged([(0, 5), (20, 1), (33, 7)], heads=heads, kv_heads=kv_heads, dim=16)
    assert_near(run(case), case.expected)


@pytest.mark.parametrize(
    ("rows", "keys", "splits"),
    [(16, 16, 1), (16, 64, 1), (128, 16, 1), (128, 64, 1), (16, 32, 2), (64, 16, 2), (32, 16, 8)],
)
def test_tile_shapes_and_splits(rows: int, keys: int, splits: int) -> None:
    """The keys split among programs, decoding or not: some get no key at all, some only keys of the future."""
    case = paged([(0, 1), (15, 1), (16, 1), (63, 1), (60, 9), (0, 33)], heads=2, kv_heads=1, dim=16)
    before = launches["merge_splits_kernel"]
    assert_near(run(case, rows=rows, keys=keys, splits=splits), case.expected)
    assert launches["merge_splits_kernel"] - before == (splits > 1)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding(splits: int) -> None:
    """As a CUDA graph pads: rows of no sequence, sequences without tokens, and a wider table in int32."""
    case = paged([(7, 1), (0, 6)], dim=16)
    wide = torch.zeros(4, 9, dtype=torch.int32)
    wide[:2, : case.tables.shape[1]] = case.tables
    q = torch.cat([case.q, torch.full((3, 4, 16), float("nan"))])
    starts, lengths = [*case.starts, 7, 7], [*case.lengths, 0, 0]
    padded = Paged(q, case.k_cache, case.v_cache, wide, starts, lengths, case.expected)
    assert_near(run(padded, splits=splits)[:7], case.expected)


def test_a_table_that_is_a_view_of_the_runners_whole_table() -> None:
    case = paged(MIXED, dim=16)
    whole = torch.full((len(MIXED) + 2, 40), 10**9)
    whole[: len(MIXED), : case.tables.shape[1]] = case.tables
    view = whole[: len(MIXED), : case.tables.shape[1]]
    assert not view.is_contiguous()
    out = paged_attention(case.q, case.k_cache, case.v_cache, view, case.plan(), 0.25)
    assert_near(out, case.expected)


def test_large_scores_neither_overflow_nor_lose_the_small_ones() -> None:
    case = paged([(40, 3)], dim=16)
    case.k_cache.mul_(100)
    scale = 0.25 / 100
    assert_near(
        paged_attention(case.q, case.k_cache, case.v_cache, case.tables, case.plan(keys=16), scale), case.expected
    )
    spread = paged_attention(case.q, case.k_cache, case.v_cache, case.tables, case.plan(keys=16), 25.0)
    split = paged_attention(case.q, case.k_cache, case.v_cache, case.tables, case.plan(keys=16, splits=2), 25.0)
    assert spread.isfinite().all()
    torch.testing.assert_close(spread, split, rtol=0, atol=1e-5)


def test_offsets_above_two_to_the_31() -> None:
    """The memory is reserved only: one page of it is touched. With 32 bits the address would be another."""
    case = paged([(2, 1)], heads=16, kv_heads=16, dim=64)
    num_blocks = 2**31 // (16 * 16 * 64) + 9
    caches = [torch.empty(num_blocks, 16, 16, 64) for _ in "kv"]
    for large, small in zip(caches, (case.k_cache, case.v_cache), strict=True):
        large[-1] = small[case.tables[0, 0]]
    for kind in (torch.int32, torch.int64):
        tables = torch.tensor([[num_blocks - 1]], dtype=kind)
        assert_near(paged_attention(case.q, *caches, tables, case.plan(rows=16), 1 / 8), case.expected)


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    kv_heads=st.integers(1, 2),
    block_size=st.sampled_from([1, 3, 8, 16, 32]),
    rows=st.sampled_from([16, 32, 64]),
    keys=st.sampled_from([16, 32]),
    splits=st.sampled_from([1, 1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    sequences: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    block_size: int,
    rows: int,
    keys: int,
    splits: int,
    seed: int,
) -> None:
    case = paged(sequences, group * kv_heads, kv_heads, 16, block_size, seed=seed)
    assert_near(run(case, rows=rows, keys=keys, splits=splits), case.expected)


# ---------------------------------------------------------------- the plan

H200, T4 = Card(90, 132), Card(75, 40)


@pytest.mark.parametrize(
    ("rows", "group", "dim", "dtype", "card", "expected"),
    [
        (2, 2, 128, torch.bfloat16, H200, TileShape(16, 64, 4, 3)),  # decoding
        (10, 2, 128, torch.bfloat16, H200, TileShape(16, 64, 4, 3)),  # 4 drafts to verify
        (16, 1, 64, torch.float16, H200, TileShape(16, 128, 4, 3)),
        (17, 1, 64, torch.float16, H200, TileShape(64, 64, 4, 3)),
        (17, 1, 80, torch.float16, H200, TileShape(64, 32, 4, 3)),
        (4096, 2, 128, torch.float16, H200, TileShape(128, 64, 8, 3)),
        (4096, 2, 256, torch.float16, H200, TileShape(64, 32, 8, 2)),
        (4096, 2, 128, torch.float32, H200, TileShape(32, 16, 8, 1)),
        (4096, 2, 128, torch.float16, T4, TileShape(32, 16, 8, 1)),
        (48, 48, 64, torch.float16, T4, TileShape(64, 16, 8, 1)),  # all heads of a token in one tile
    ],
)
def test_tile_shape(rows: int, group: int, dim: int, dtype: torch.dtype, card: Card, expected: TileShape) -> None:
    assert tile_shape(rows, group, dim, dtype, card) == expected


@pytest.mark.parametrize(
    ("programs", "longest", "expected"),
    [(8, 32768, 32), (8, 255, 1), (8, 512, 2), (8, 2047, 4), (100, 32768, 4), (264, 32768, 2), (265, 32768, 1)],
)
def test_splits_fill_the_card_and_leave_each_program_enough_to_do(programs: int, longest: int, expected: int) -> None:
    assert num_splits(programs, longest, H200) == expected


def test_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(0, 4, 2, 16, torch.empty(0))
    plan = plan_attention([0, 1, 6], [9, 5], spec, torch.float16, CPU, Card.of(CPU))
    assert (plan.query_start_loc.tolist(), plan.seq_lens.tolist()) == ([0, 1, 6], [9, 5])
    assert {plan.query_start_loc.dtype, plan.seq_lens.dtype} == {torch.int32}
    assert (plan.shape.rows, plan.num_splits) == (16, 1)
    monkeypatch.setattr(attention_plan, "MIN_SHARE", 2)
    assert plan_attention([0, 1, 6], [9, 5], spec, torch.float16, CPU, Card(80, 100)).num_splits == 4
