"""Attention through block tables, and `engine="paged"`: the contiguous path and the reference engine are oracles."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedvllm import LLM, SamplingParams
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
from pagedvllm.attention.paged import PagedMetadata, pad_tables, page_bytes, paged_slots
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.rotary import rotary_table
from pagedvllm.ops import TorchOps
from tests.conftest import save_checkpoint

CPU = torch.device("cpu")


def spec(heads: int, kv_heads: int, dim: int = 8) -> AttentionSpec:
    table = rotary_table({"rope_type": "default", "rope_theta": 100.0}, dim, 64)
    return AttentionSpec(0, heads, kv_heads, dim, table)


def inputs(layer: AttentionSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (torch.randn(rows, h, layer.head_dim) for h in heads)
    return q, k, v


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_rows_equal_the_contiguous_path(heads: int, kv_heads: int, block_size: int) -> None:
    """Prefill, the chunks of another prompt, and decodes in one call; whatever else the cache holds is NaN."""
    torch.manual_seed(0)
    layer, lengths, chunks = spec(heads, kv_heads), [9, 17, 1, 22], [[9], [5, 12], [1], [21, 1]]
    paged = TorchPagedAttention([layer], 64, block_size, torch.float32, CPU)
    for cache in paged.caches[0]:
        cache.fill_(float("nan"))
    contiguous = ContiguousAttention([layer], 4 * 32, torch.float32, CPU)
    order = random.Random(1).sample(range(1, 64), 63)
    tables = [[order.pop() for _ in range(-(-length // block_size))] for length in lengths]
    data = [inputs(layer, length) for length in lengths]
    for call in ([0, None, None, 0], [None, 0, 0, None], [None, 1, None, 1]):  # which chunk of whom
        spans = []
        for i, number in enumerate(call):
            if number is not None:
                start = sum(chunks[i][:number])
                spans.append((i, start, start + chunks[i][number]))
        q, k, v = (torch.cat([data[i][part][start:end] for i, start, end in spans]) for part in range(3))
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        starts = [0]
        for _, start, end in spans:
            starts.append(starts[-1] + end - start)
        ends = [end for _, _, end in spans]
        slots = [s for i, start, end in spans for s in paged_slots(tables[i], block_size, start, end)]
        meta = PagedMetadata(starts, ends, torch.tensor(slots), pad_tables([tables[i] for i, _, _ in spans], CPU))
        got = paged.forward(layer, q, k, v, ForwardContext(positions, meta, paged, TorchOps()))
        firsts = [i * 32 for i, _, _ in spans]
        places = torch.cat([torch.arange(i * 32 + start, i * 32 + end) for i, start, end in spans])
        flat = ContiguousMetadata(starts, ends, places, firsts)
        want = contiguous.forward(layer, q, k, v, ForwardContext(positions, flat, contiguous, TorchOps()))
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_pages_that_are_shared_and_padding_that_is_written_nowhere() -> None:
    layer = spec(2, 2)
    paged = TorchPagedAttention([layer], 8, 4, torch.float32, CPU)
    for cache in paged.caches[0]:
        cache.zero_()
    q, k, v = inputs(layer, 6)
    first = PagedMetadata([0, 6], [6], torch.tensor(paged_slots([3, 5], 4, 0, 6)), torch.tensor([[3, 5]]))
    whole = paged.forward(layer, q, k, v, ForwardContext(torch.arange(6), first, paged, TorchOps()))
    # A second sequence begins with block 3 and computes only its last two tokens, in block 6; the last row is padding.
    rows = [torch.cat([x[4:6], x[:1]]) for x in (q, k, v)]
    second = PagedMetadata([0, 2], [6], torch.tensor([24, 25, -1]), torch.tensor([[3, 6]]))
    before = paged.caches[0][0].clone()
    part = paged.forward(layer, *rows, ForwardContext(torch.tensor([4, 5, 0]), second, paged, TorchOps()))
    torch.testing.assert_close(part[:2], whole[4:], rtol=0, atol=1e-6)
    changed = (paged.caches[0][0] != before).any(-1).any(-1).nonzero().tolist()
    assert changed == [[6, 0], [6, 1]]


def test_cache_offsets_above_two_to_the_31() -> None:
    """swiftLLM: 32-bit offsets overflow. The memory is reserved only; two pages of it are touched."""
    layer = spec(16, 16, dim=64)
    block_size, per_block = 16, 16 * 16 * 64
    num_blocks = 2**31 // per_block + 9
    paged = TorchPagedAttention([layer], num_blocks, block_size, torch.float16, CPU)
    last = num_blocks - 1
    assert last * per_block > 2**31
    q, k, v = (x.half() for x in inputs(layer, 3))
    meta = PagedMetadata([0, 3], [3], torch.tensor(paged_slots([last], block_size, 0, 3)), torch.tensor([[last]]))
    got = paged.forward(layer, q, k, v, ForwardContext(torch.arange(3), meta, paged, TorchOps()))
    small = TorchPagedAttention([layer], 2, block_size, torch.float16, CPU)
    near = PagedMetadata([0, 3], [3], torch.tensor([16, 17, 18]), torch.tensor([[1]]))
    want = small.forward(layer, q, k, v, ForwardContext(torch.arange(3), near, small, TorchOps()))
    assert torch.equal(got, want) and got.abs().sum() > 0


def test_page_bytes() -> None:
    assert page_bytes([spec(4, 2), spec(4, 2)], 16, torch.float16) == 2 * (2 * 16 * 2 * 8 * 2)


# ---------------------------------------------------------------- the engine, on a small random model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, "qwen3")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    yield path


def mixed(seed: int, count: int = 32) -> tuple[list[list[int]], list[SamplingParams]]:
    r = random.Random(seed)
    common = [r.randrange(3, 100) for _ in range(20)]
    prompts, params = [], []
    for i in range(count):
        new = [r.randrange(3, 100) for _ in range(r.randrange(1, 40))]
        prompts.append(common[: r.choice([4, 9, 20])] + new if i % 3 else new)
        sampled = {"temperature": 0.8, "seed": i} if i % 8 == 5 else {"temperature": 0.0}
        params.append(SamplingParams(max_tokens=r.randrange(1, 30), ignore_eos=i % 2 == 0, **sampled))  # type: ignore[arg-type]
    return prompts, params


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def paged(model: Path, **settings: Any) -> tuple[LLM, Any]:
    llm = LLM(str(model), **{"engine": "paged", "scheduler_cls": "recording", **settings})
    return llm, llm.engine.scheduler  # type: ignore[attr-defined]


def count(trace: list[dict[str, Any]]) -> tuple[int, int]:
    """(preemptions, cached tokens)."""
    hits = sum(sum(line["admitted_computed"].values()) for line in trace)
    return sum(len(line["preempted"]) for line in trace), hits


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    return LLM(str(tiny), engine="reference").generate(*mixed(0))


SMALL = {"num_gpu_blocks_override": 30, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"policy": "priority"},
        {"long_prefill_token_threshold": 5, "scheduler_reserve_full_isl": False},
        {"watermark": 0.1},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    ],
    ids=lambda limits: "-".join(limits) or "plain",
)
def test_32_mixed_requests_in_a_pool_that_preempts(
    tiny: Path, expected: list[Any], limits: dict[str, Any], caching: bool
) -> None:
    llm, scheduler = paged(tiny, enable_prefix_caching=caching, **{**SMALL, **limits})
    outputs = llm.generate(*mixed(0))
    assert tokens(outputs) == tokens(expected)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
    assert [o.outputs[0].finish_reason for o in outputs] == [o.outputs[0].finish_reason for o in expected]
    preemptions, cached = count(scheduler.trace)
    assert preemptions > 0 and (cached > 0) == caching
    assert max(len(line["scheduled"]) for line in scheduler.trace) > 3
    scheduler.check_invariants()
    assert scheduler.kv.num_free_blocks == 29


def test_a_large_pool_runs_them_all_at_once(tiny: Path, expected: list[Any]) -> None:
    llm, scheduler = paged(tiny)
    assert tokens(llm.generate(*mixed(0))) == tokens(expected)
    assert len(scheduler.trace) < 40 and count(scheduler.trace)[0] == 0
    assert len(scheduler.trace[0]["scheduled"]) == 32  # prompts that share a beginning hit it in the very same step
    assert count(scheduler.trace[:1])[1] > 0


def test_whatever_memory_held_before_does_not_matter(tiny: Path, expected: list[Any]) -> None:
    llm, _ = paged(tiny, **SMALL)
    for caches in llm.engine.attention.caches:  # type: ignore[attr-defined]
        for cache in caches:
            cache.fill_(float("nan"))
    assert tokens(llm.generate(*mixed(0))) == tokens(expected)


def test_same_text_as_the_reference_on_the_embedded_model(embedded: Path) -> None:
    prompts = ["The capital of France is", "1, 2, 3,", "Once upon a time", "The capital of France was"]
    params = SamplingParams(temperature=0, max_tokens=10)
    want = LLM(str(embedded), engine="reference").generate(prompts, params)
    llm, scheduler = paged(
        embedded, num_gpu_blocks_override=11, block_size=4, max_num_batched_tokens=12, max_num_seqs=4
    )
    got = llm.generate(prompts, params)
    assert [(o.outputs[0].token_ids, o.outputs[0].text) for o in got] == [
        (o.outputs[0].token_ids, o.outputs[0].text) for o in want
    ]
    assert count(scheduler.trace)[0] > 0


def test_streaming_leaving_and_failing(tiny: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, scheduler = paged(tiny, **SMALL)
    prompts, params = mixed(0)
    seen = [output.outputs[0].token_ids for output in llm.stream(prompts[1], params[1])]
    assert seen[-1] == tokens(expected)[1] and all(len(b) == len(a) + 1 for a, b in pairwise(seen))
    stream = llm.stream(prompts[0], params[0])
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    with monkeypatch.context() as patch:
        calls = iter([False] * 5 + [True] * 99)
        forward = llm.engine.forward  # type: ignore[attr-defined]

        def failing(*arguments: Any) -> torch.Tensor:
            if next(calls):
                raise RuntimeError("out of memory")
            return forward(*arguments)  # type: ignore[no-any-return]

        patch.setattr(llm.engine, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(prompts, params)
    assert not llm.engine.has_unfinished_requests()
    scheduler.check_invariants()
    assert tokens(llm.generate(prompts, params)) == tokens(expected)


def test_settings_are_honoured_or_refused(tiny: Path) -> None:
    llm, scheduler = paged(tiny, block_size=8, num_gpu_blocks_override=5, max_num_seqs=3, max_num_batched_tokens=7)
    assert (scheduler.kv.num_blocks, scheduler.kv.block_size) == (5, 8)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 7)
    assert llm.engine.max_model_len == 32  # mini-sglang issue 68: no longer than what the pool holds
    page = page_bytes(llm.engine.model.attention_specs(), 16, torch.float32)  # type: ignore[attr-defined]
    assert paged(tiny, kv_cache_memory_bytes=10 * page + 1)[1].kv.num_blocks == 10
    assert type(paged(tiny, kv_manager="plain")[1].kv).__name__ == "KVCacheManager"
    for settings, message in [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization has no effect in engine 'paged'"),
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes must be at least"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size has no effect in engine 'paged'"),
        ({"kv_manager": "counting"}, "kv_manager 'counting' knows no block from another"),
        ({"kv_manager": "fast"}, "kv_manager must be one of auto, counting, plain, prefix"),
        ({"attention_backend": "fast"}, "attention_backend must be one of torch"),
        ({"scheduler_cls": "fast"}, "scheduler_cls must be one of default, recording"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens \(8\) must be at least max_num_seqs",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            paged(tiny, **settings)
    with pytest.raises(ValueError, match="block_size has no effect in engine 'reference'"):
        LLM(str(tiny), engine="reference", block_size=8)
    with pytest.raises(ValueError, match="logprobs is not supported by engine 'paged'"):
        llm.generate([1, 2], SamplingParams(logprobs=1))
    assert not llm.engine.has_unfinished_requests()
