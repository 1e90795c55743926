"""The backend against the torch backend, and whole engines whose attention and Ops are kernels, in the interpreter."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedvllm import LLM, SamplingParams
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedMetadata, pad_tables, paged_slots
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.attention.triton_paged import TritonPagedAttention
from pagedvllm.forward_context import ForwardContext
from pagedvllm.kernels import attention_plan
from pagedvllm.kernels.attention_plan import Card
from pagedvllm.kernels.launch import launches
from pagedvllm.model.rotary import rotary_table
from pagedvllm.ops import TorchOps
from tests.conftest import save_checkpoint
from tests.engines import ENGINES, scheduler_of
from tests.kernels.support import CPU

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_same_output_and_same_cache_as_the_torch_backend(dtype: torch.dtype) -> None:
    """Three steps: prompts, chunks and a decode, decodes. The second layer uses the plan that the first one made."""
    torch.manual_seed(0)
    table = rotary_table({"rope_type": "default", "rope_theta": 100.0}, 16, 64)
    specs = [AttentionSpec(i, 6, 2, 16, table) for i in range(2)]
    backends = [kind(specs, 9, 4, dtype, CPU) for kind in (TritonPagedAttention, TorchPagedAttention)]
    for backend in backends:
        for cache in backend.caches[0] + backend.caches[1]:
            cache.zero_()
    tables = [[5, 7, 8], [1, 2], [3]]
    for news, ends in (([4, 5, 1], [4, 5, 1]), ([5, 1, 2], [9, 6, 3]), ([1, 1, 1], [10, 7, 4])):
        starts = [sum(news[:i]) for i in range(4)]
        spans = [(t, end - new, end) for t, new, end in zip(tables, news, ends, strict=True)]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots = torch.tensor([s for t, start, end in spans for s in paged_slots(t, 4, start, end)])
        meta = PagedMetadata(starts, ends, slots, pad_tables(tables, CPU))
        for layer in specs:
            q, k, v = torch.randn(len(slots), 10, 16).to(dtype).split([6, 2, 2], dim=1)
            got, want = (
                backend.forward(layer, q, k, v, ForwardContext(positions, meta, backend, TorchOps()))
                for backend in backends
            )
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)
            for a, b in zip(*(backend.caches[layer.layer_index] for backend in backends), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)
    assert isinstance(backends[0], TritonPagedAttention) and backends[0]._planned is not None
    assert backends[0]._planned[0] is meta


def test_two_batches_in_turn_do_not_use_each_others_plan() -> None:
    spec = AttentionSpec(0, 2, 1, 16, torch.empty(0))
    backend = TritonPagedAttention([spec], 4, 4, torch.float32, CPU)
    metas = [PagedMetadata([0, n], [n], torch.arange(n), torch.tensor([[1]])) for n in (1, 3)]
    for meta in (*metas, *metas):
        plan = backend.plan(meta, spec, torch.empty(1, 2, 16))
        assert plan.seq_lens.tolist() == meta.seq_lens
        assert backend.plan(meta, spec, torch.empty(1, 2, 16)) is plan


# ---------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, "qwen3")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    return path


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    r = random.Random(0)
    prompts = [[r.randrange(3, 100) for _ in range(r.choice([1, 5, 9, 17]))] for _ in range(count)]
    params = [SamplingParams(temperature=0.0, max_tokens=r.randrange(4, 11), ignore_eos=True) for _ in prompts]
    return prompts, params


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return tokens(LLM(str(tiny), engine="reference").generate(*requests(6)))


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


SMALL = {"num_gpu_blocks_override": 10, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12}


@pytest.mark.parametrize("settings", [*ENGINES.values(), {"ops": "torch"}], ids=str)
def test_an_engine_on_kernels_gives_the_references_tokens(
    tiny: Path, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    chosen = {"attention_backend": "triton", "ops": "triton", "scheduler_cls": "recording", **SMALL, **settings}
    llm, before = LLM(str(tiny), **chosen), launches.copy()
    assert tokens(llm.generate(*requests(6))) == expected
    trace = scheduler_of(llm).trace
    steps = [list(line["scheduled"].values()) for line in trace]
    assert any(len(line["preempted"]) for line in trace)
    assert any(max(step, default=0) > 1 and 1 in step for step in steps)  # prefill and decode in one batch
    assert any(step and max(step) == 1 for step in steps)  # decoding alone
    assert max(map(len, requests(6)[0])) > SMALL["max_num_batched_tokens"]  # so a prompt was computed in pieces
    ran, layers = launches - before, 2
    forwards = sum(bool(step) for step in steps)
    assert ran["rotary_kernel"] == ran["paged_attention_kernel"] == layers * forwards
    other = Counter(rms_norm_kernel=(4 * layers + 1) * forwards, silu_and_mul_kernel=layers * forwards)
    assert Counter({k: ran[k] for k in other}) == (Counter() if settings.get("ops") == "torch" else other)


def test_long_contexts_are_split_inside_the_engine(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "MIN_SHARE", 9)
    monkeypatch.setattr(Card, "of", classmethod(lambda cls, device: cls(80, 100)))
    llm = LLM(str(tiny), attention_backend="triton", **SMALL)
    before = launches.copy()
    prompts, params = requests(6)
    assert tokens(llm.generate(prompts[:3], params[:3])) == expected[:3]
    ran = launches - before
    assert 0 < ran["merge_splits_kernel"] < ran["paged_attention_kernel"]


def test_fp16(tiny: Path) -> None:
    settings = {"dtype": "float16", "num_gpu_blocks_override": 40, "block_size": 8}
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12]]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    want = LLM(str(tiny), **settings).generate(prompts, params)
    got = LLM(str(tiny), attention_backend="triton", ops="triton", **settings).generate(prompts, params)
    assert tokens(got) == tokens(want)
