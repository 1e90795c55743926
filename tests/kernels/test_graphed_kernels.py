"""Kernels in recorded steps, in the interpreter: the tape starts them again with the arguments that they had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedvllm import LLM, SamplingParams
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.triton_paged import TritonPagedAttention
from pagedvllm.kernels import attention_plan
from pagedvllm.kernels.attention_plan import Card
from pagedvllm.kernels.launch import Launch, diverted, launches, recorded
from pagedvllm.kernels.ops import TritonOps
from pagedvllm.worker.cuda_graph import PlanningAttention
from pagedvllm.worker.graph_tape import TapeRecorder
from tests.kernels.support import CPU
from tests.kernels.test_engine_with_kernels import SMALL, expected, requests, tiny, tokens  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply"),  # padding sees the null block: anything
]
TAPED = {"attention_backend": "triton", "ops": "triton", "cudagraph_recorder": "tape", **SMALL}


def model_of(llm: LLM) -> Any:
    engine: Any = llm.engine
    return engine.core.executor.worker.runner.model


@pytest.mark.parametrize("settings", [{"cudagraph_capture_sizes": [3]}, {"ops": "torch"}], ids=str)
def test_an_engine_with_graphs_gives_the_references_tokens(
    tiny: Path,  # noqa: F811
    expected: list[list[int]],  # noqa: F811
    settings: dict[str, Any],
) -> None:
    llm = LLM(str(tiny), **{**TAPED, **settings})
    model, before = model_of(llm), launches.copy()
    python = Counter[int]()
    inner = model.model
    model.model = lambda ids, ctx: python.update([len(ids)]) or inner(ids, ctx)
    assert tokens(llm.generate(*requests(6))) == expected
    ran, layers = launches - before, 2
    assert model.replays.total() > 3 and python.total() > 3
    assert ran["rotary_kernel"] == ran["paged_attention_kernel"] == layers * (model.replays.total() + python.total())


def test_split_keys_in_a_graph(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The number of splits is that of the longest sequence there may be: most of them have no key at all."""
    prompts, params = [[9, 8, 7, 6, 5], [4]], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    want = tokens(LLM(str(tiny), engine="reference").generate(prompts, params))
    monkeypatch.setattr(attention_plan, "MIN_SHARE", 16)
    monkeypatch.setattr(Card, "of", classmethod(lambda cls, device: cls(80, 100)))
    llm = LLM(str(tiny), **TAPED, cudagraph_capture_sizes=[3])
    before = launches.copy()
    assert tokens(llm.generate(prompts, params)) == want
    assert (launches - before)["merge_splits_kernel"] == 2 * model_of(llm).replays.total() == 8


def test_a_padded_row_is_written_nowhere(tiny: Path) -> None:  # noqa: F811
    """nano-vllm issue 89: there, padding wrote to slot 0, which was somebody's; the first output came out wrong."""
    llm = LLM(str(tiny), **TAPED, cudagraph_capture_sizes=[4])
    model = model_of(llm)
    caches = [cache for pair in model.attention.caches for cache in pair]
    for cache in caches:
        cache.fill_(5.0)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([[7, 8, 9], [4]], [params, params])
    assert model.replays == {4: 2}
    for cache in caches:
        written = (cache != 5.0).any(-1).any(-1).nonzero().tolist()
        assert all(block > 0 for block, _ in written), "the null block is left alone"
        assert len(written) == 3 + 2 + 1 + 2, "a row for each token that was computed"


def test_the_backend_can_be_recorded() -> None:
    attention = TritonPagedAttention([AttentionSpec(0, 2, 1, 16, torch.empty(0))], 4, 4, torch.float32, CPU)
    assert isinstance(attention, PlanningAttention)


def test_launches_are_diverted() -> None:
    x, weight, before = torch.ones(2, 16), torch.ones(16), launches.copy()
    seen: list[Launch] = []
    with diverted(seen.append):
        TritonOps().rms_norm(x, weight, 1e-6)
        with recorded() as calls:
            TritonOps().rms_norm(x, weight, 1e-6)
        with diverted(None):
            assert TritonOps().rms_norm(x, weight, 1e-6).isfinite().all()
    assert len(seen) == len(calls) == 1 and (launches - before).total() == 1
    graph = TapeRecorder(CPU).record(lambda: TritonOps().rms_norm(x * 2, weight, 1e-6))
    x.copy_(torch.arange(32.0).view(2, 16))
    graph.replay()
    torch.testing.assert_close(graph.output, TritonOps().rms_norm(x * 2, weight, 1e-6))
