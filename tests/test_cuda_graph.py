"""Decode steps recorded and replayed, on a CPU: `TapeRecorder` does again what was done, on the same memory.

So what a CUDA graph would not look at again (a list, a number, a buffer that was exchanged) it does not look at either.
"""

from __future__ import annotations

import gc
import logging
import random
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pagedvllm import LLM, EngineConfig, SamplingParams
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.paged import PagedMetadata
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.ops import TorchOps
from pagedvllm.worker import graph_worker, worker
from pagedvllm.worker.cuda_graph import CudaGraphRecorder, Graph, GraphedModel, StaticBatch, capture_sizes
from pagedvllm.worker.graph_tape import TapeRecorder
from pagedvllm.worker.graph_worker import GraphWorker
from tests.conftest import save_checkpoint
from tests.test_worker import MIB, Card

CPU = torch.device("cpu")
ME = "tests.test_cuda_graph"


class PlanningTorchAttention(TorchPagedAttention):
    """Decodes with tensors alone, as kernels do; whatever else there is, as its base does."""

    planned: Any = (None, None)

    def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> Any:
        if self.planned[0] is not meta:
            self.planned = meta, SimpleNamespace(seq_lens=torch.tensor(meta.seq_lens, dtype=torch.int32))
        return self.planned[1]

    def forward(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        if meta.query_start_loc != list(range(len(meta.seq_lens) + 1)):
            return super().forward(spec, q, k, v, ctx)
        lengths = self.plan(meta, spec, q).seq_lens
        q, k = ctx.ops.rotary(q, k, ctx.positions, spec.cos_sin)
        slots = meta.slot_mapping.clamp(min=0)  # padding goes to the null block
        seen = torch.arange(meta.block_tables.shape[1] * self.block_size) < lengths[:, None]  # [S, keys]
        found = []
        for cache, new in zip(self.caches[spec.layer_index], (k, v), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, new)
            rows = cache.flatten(0, 1).index_select(0, self.slots_of(meta.block_tables)).unflatten(0, seen.shape)
            rows = torch.where(seen[:, :, None, None], rows, 0.0)  # what is no key of ours may be NaN
            found.append(rows.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2))
        scores = torch.einsum("shd,skhd->shk", q, found[0]) * spec.scale
        weights = scores.masked_fill(~seen[:, None, :], float("-inf")).softmax(-1)
        return torch.einsum("shk,skhd->shd", weights, found[1])

    def slots_of(self, tables: Tensor) -> Tensor:
        return (tables[:, :, None] * self.block_size + torch.arange(self.block_size)).flatten()


# ---------------------------------------------------------------- sizes


def limits(seqs: int, tokens: int = 8192, longest: int = 4096) -> BatchLimits:
    return BatchLimits(seqs, tokens, longest, 16)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (capture_sizes(limits(1)), [1]),
        (capture_sizes(limits(3)), [1, 2, 3]),
        (capture_sizes(limits(20)), [1, 2, 4, 8, 16, 20]),
        (capture_sizes(limits(256)), [1, 2, 4, *range(8, 257, 8)]),
        (capture_sizes(limits(1024))[-18:], [248, *range(256, 513, 16)]),
        (capture_sizes(limits(256, tokens=30)), [1, 2, 4, 8, 16, 24, 30]),
        (capture_sizes(limits(256, longest=10)), [1, 2, 4, 8, 10]),
        (capture_sizes(limits(8), [4, 2, 4]), [2, 4]),
        (capture_sizes(limits(8), [64, 1, 32]), [1, 8]),  # capped
        (capture_sizes(limits(64, longest=16), [64]), [16]),
        (capture_sizes(limits(1024), [1024]), [1024]),  # who asks for it gets it
    ],
)
def test_sizes(found: list[int], expected: list[int]) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"cudagraph_capture_sizes": (1, 2)}, TypeError, r"cudagraph_capture_sizes must be list or None, got \(1, 2\)"),
        ({"cudagraph_capture_sizes": [1, "2"]}, TypeError, "cudagraph_capture_sizes must be batch sizes, got"),
        ({"cudagraph_capture_sizes": [True]}, TypeError, "cudagraph_capture_sizes must be batch sizes, got"),
        ({"cudagraph_capture_sizes": []}, TypeError, "cudagraph_capture_sizes must be batch sizes, got"),
        ({"cudagraph_capture_sizes": [0, 4]}, ValueError, "cudagraph_capture_sizes must be at least 1, got 0"),
        ({"enforce_eager": 1}, TypeError, "enforce_eager must be bool"),
        ({"cudagraph_recorder": "film"}, ValueError, "cudagraph_recorder must be one of auto, cuda, tape; got 'film'"),
    ],
)
def test_mistakes_are_named(setting: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig.create(**setting)
    assert EngineConfig.create(cudagraph_capture_sizes=[4, 1]).compilation.cudagraph_capture_sizes == [4, 1]


# ---------------------------------------------------------------- one model, step by step


class SumModel:
    """Adds up all that a step's row is made of; keeps what it was called with."""

    def __init__(self) -> None:
        self.build, self.logits = SimpleNamespace(device=CPU, dtype=torch.float32), None
        self.calls: list[ForwardContext] = []

    def attention_specs(self) -> list[AttentionSpec]:
        return [AttentionSpec(0, 2, 1, 4, torch.empty(0))]

    def __call__(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        self.calls.append(ctx)
        meta: Any = ctx.metadata
        lengths = cast("Any", ctx.attention).plan(meta, None, None).seq_lens
        width = meta.block_tables.shape[1]
        parts = token_ids, ctx.positions, meta.slot_mapping, lengths, *meta.block_tables.unbind(1)
        return torch.stack([part.long() for part in parts] + [token_ids] * (4 - width), dim=1)


def graphed(sizes: list[int], recorder: Any = None) -> tuple[GraphedModel, SumModel, Any]:
    model, attention = SumModel(), PlanningTorchAttention([], 1, 4, torch.float32, CPU)
    parts = cast("Any", model), attention, TorchOps(), BatchLimits(8, 64, 16, 4)
    return GraphedModel(*parts, sizes, recorder or TapeRecorder(CPU)), model, attention


def decode(attention: Any, count: int, width: int = 4, shift: int = 0) -> tuple[Tensor, ForwardContext]:
    """`count` requests with one new token each; all numbers differ."""
    ids, positions = torch.arange(count) + 20 + shift, torch.arange(count) + 3 + shift
    tables = torch.arange(count * width).view(count, width) + 100 + shift
    meta = PagedMetadata(list(range(count + 1)), (positions + 1).tolist(), torch.arange(count) + 50 + shift, tables)
    return ids, ForwardContext(positions, meta, attention, TorchOps())


def test_replays_read_the_current_buffers_and_padding_reads_and_writes_nothing() -> None:
    """Sizes and table widths in turn, so that something of another step is always left in the buffers."""
    run, model, attention = graphed([4, 1, 2, 8])
    assert [len(ctx.positions) for ctx in model.calls] == [8, 4, 2, 1], "the largest is recorded first"
    for step, (count, width) in enumerate([(8, 4), (3, 2), (1, 4), (5, 3), (2, 4), (7, 1), (3, 4)]):
        before = len(model.calls)
        ids, ctx = decode(attention, count, width, shift=step)
        got = run(ids, ctx)
        assert len(model.calls) == before, "no Python of the model ran"
        meta: Any = ctx.metadata
        size = next(size for size in (1, 2, 4, 8) if size >= count)
        columns = ids, ctx.positions, meta.slot_mapping, torch.tensor(meta.seq_lens)
        assert torch.equal(got[:, :4], torch.stack(columns, dim=1))
        assert torch.equal(got[:, 4 : 4 + width], meta.block_tables)
        padding = run.graphs[size].output[count:]
        assert padding.tolist() == [[0, 0, -1, 1, 0, 0, 0, 0]] * (size - count)
    assert run.replays == {8: 3, 4: 2, 1: 1, 2: 1}


class ForgetfulRecorder:
    """Keeps nothing that a recording works on, as a CUDA graph does: it has only addresses."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, function: Callable[[], Tensor]) -> Graph:
        return Graph(lambda: None, function())


def test_what_a_graph_reads_and_writes_lives_on() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watched(PlanningTorchAttention):
        def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> Any:
            plan = super().plan(meta, spec, q)
            seen.append(weakref.ref(plan.seq_lens))
            return plan

    model = SumModel()
    attention = Watched([], 1, 16, torch.float32, CPU)
    graphs = GraphedModel(model, attention, TorchOps(), limits(8), [1, 2, 4], ForgetfulRecorder(CPU))  # type: ignore[arg-type]
    attention.planned = (None, None)  # an eager step has planned something else since
    gc.collect()
    assert len(graphs.graphs) == 3 and len(seen) >= 3 and all(reference() is not None for reference in seen)


def test_what_is_eligible() -> None:
    run, model, attention = graphed([1, 4])
    before = len(model.calls)

    def meta(starts: list[int], lengths: list[int]) -> ForwardContext:
        tables = torch.zeros(len(lengths), 1, dtype=torch.int64)
        slots = torch.zeros(starts[-1], dtype=torch.int64)
        return ForwardContext(slots, PagedMetadata(starts, lengths, slots, tables), attention, TorchOps())

    assert run.eligible(decode(attention, 4)[1]) and run.eligible(decode(attention, 1)[1])
    assert run.eligible(meta([0, 1], [1])), "a prompt of one token is no different"
    assert not run.eligible(decode(attention, 5)[1]), "more than were recorded"
    assert not run.eligible(meta([0, 2], [2])), "a prompt"
    assert not run.eligible(meta([0, 1, 3], [9, 2])), "a decode and a prompt"
    assert not run.eligible(meta([0, 1, 4, 5], [9, 12, 3])), "guesses to be verified"
    other = PlanningTorchAttention([], 1, 4, torch.float32, CPU)
    assert not run.eligible(decode(other, 2)[1]), "another cache than the one that was recorded"
    ids, ctx = decode(attention, 5)
    assert len(run(ids, ctx)) == 5 and len(model.calls) == before + 1 and model.calls[-1] is ctx
    assert not run.replays


def test_a_static_batch_keeps_its_addresses() -> None:
    batch = StaticBatch(4, 3, CPU)
    tensors = batch.token_ids, batch.positions, batch.slots, batch.tables
    assert batch.slots.tolist() == [-1] * 4, "recording writes to no slot"
    addresses = [tensor.data_ptr() for tensor in tensors]
    for count in (4, 2, 1):
        batch.fill(*decode(None, count, 3), size=4)
    assert [t.data_ptr() for t in (batch.token_ids, batch.positions, batch.slots, batch.tables)] == addresses


# ---------------------------------------------------------------- the tape


def test_a_tape_does_the_same_again_on_the_same_memory() -> None:
    x, factor, y = torch.tensor([1.0, 2.0]), 3.0, torch.zeros(2)

    def function() -> Tensor:
        y.add_(1)  # in place
        a, b = (x * factor).split(1)  # views of something new
        return torch.cat([b, a]) + y

    graph = TapeRecorder(CPU).record(function)
    assert graph.output.tolist() == [7, 4] and y.tolist() == [1, 1]
    address, factor = graph.output.data_ptr(), 100.0
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert graph.output.tolist() == [62, 32] and y.tolist() == [2, 2], "the host's number is the recorded one"
    x = torch.tensor([0.0, 0.0])  # another tensor: nobody looks there
    graph.replay()
    assert graph.output.tolist() == [63, 33] and graph.output.data_ptr() == address


@pytest.mark.parametrize(
    "function",
    [lambda x: x[x > 1], lambda x: x * x[0].item(), lambda x: x.nonzero(), lambda x: x if x.sum() > 0 else -x],
)
def test_a_tape_refuses_what_waits_for_the_device(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(RuntimeError, match="reads a tensor on the host: it cannot be recorded"):
        TapeRecorder(CPU).record(lambda: function(x))
    assert (x + 1).tolist() == [2, 3], "and lets go"


def test_the_order_of_recording_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up on the stream that records, and only then recorded, into the one pool."""
    log: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.wait_stream = lambda other: log.append(("waits for", other))
            self.synchronize = lambda: log.append("synchronized")

    class Within:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.what = "recording" if named else "warming up"
            log.append((self.what, *arguments, *named.values()))

        def __enter__(self) -> None:
            log.append("in")

        def __exit__(self, *error: Any) -> None:
            log.append("out")

    graph = SimpleNamespace(replay=lambda: log.append("replayed"))
    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "stream": Within,
        "graph": Within,
        "CUDAGraph": lambda: graph,
        "current_stream": lambda: "current",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaGraphRecorder(torch.device("cuda"))
    made = recorder.record(lambda: log.append("called") or torch.ones(1))  # type: ignore[func-returns-value]
    stream = recorder.stream
    assert log == [
        ("waits for", "current"), ("warming up", stream), "in", "called", "out", "synchronized",
        ("recording", graph, "pool", stream), "in", "called", "out",
    ]  # fmt: skip
    made.replay()
    assert log[-1] == "replayed" and made.output.tolist() == [1]


# ---------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_checkpoint(path, "qwen3")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    return path


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 100) for _ in range(rng.choice([1, 5, 9, 17]))] for _ in range(9)]
    lengths = [rng.randrange(4, 14) for _ in prompts]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(*requests())]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return tokens(LLM(str(tiny), engine="reference"))


SMALL = {"num_gpu_blocks_override": 16, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 12}
TAPED = {"attention_backend": f"{ME}:PlanningTorchAttention", "cudagraph_recorder": "tape", **SMALL}


def model_of(llm: LLM) -> Any:
    return cast("Any", llm.engine).core.executor.worker.runner.model


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [1, 2, 4, 6]),
        ({"runner_cls": "simple"}, [1, 2, 4, 6]),
        ({"cudagraph_capture_sizes": [5]}, [5]),  # always padded, and larger batches are eager
        ({"cudagraph_capture_sizes": [3, 512]}, [3, 6]),
        ({"max_model_len": 40, "cudagraph_capture_sizes": [512], "max_num_seqs": 12}, [12]),
    ],
    ids=str,
)
def test_an_engine_with_graphs_gives_the_references_tokens(
    tiny: Path, expected: list[list[int]], settings: dict[str, Any], sizes: list[int]
) -> None:
    llm = LLM(str(tiny), **{**TAPED, "scheduler_cls": "recording", **settings})
    model = model_of(llm)
    assert isinstance(model, GraphedModel) and sorted(model.graphs) == sizes
    assert tokens(llm) == expected
    trace = cast("Any", llm.engine).core.scheduler.trace
    steps = [list(line["scheduled"].values()) for line in trace if line["scheduled"]]
    decodes = [len(step) for step in steps if max(step) == 1 and len(step) <= sizes[-1]]
    assert model.replays.total() == len(decodes) > 5 and len(steps) > len(decodes), "both ways were gone"
    assert set(decodes) - set(sizes), "some were padded"
    assert any(line["preempted"] for line in trace)


class Rebinding(StaticBatch):
    """A mistake: new tensors in the place of the buffers."""

    def fill(self, token_ids: Tensor, ctx: ForwardContext, size: int) -> None:
        for name in ("token_ids", "positions", "slots", "tables"):
            setattr(self, name, getattr(self, name).clone())
        super().fill(token_ids, ctx, size)


class Forgetting(StaticBatch):
    """A mistake: one buffer is filled once and then forgotten."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = ""

    def fill(self, token_ids: Tensor, ctx: ForwardContext, size: int) -> None:
        stale = getattr(self, self.kept).clone()
        super().fill(token_ids, ctx, size)
        getattr(self, self.kept).copy_(stale)


class FrozenLengths(PlanningTorchAttention):
    """A mistake: the lengths of the metadata's list, not those of the plan's tensor."""

    def plan(self, meta: PagedMetadata, spec: AttentionSpec, q: Tensor) -> Any:
        plan = super().plan(meta, spec, q)
        return SimpleNamespace(seq_lens=plan.seq_lens.clone())


@pytest.mark.parametrize("kept", ["token_ids", "positions", "slots", "tables", "all", "lengths"])
def test_stale_buffers_are_caught(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    settings = TAPED
    if kept == "all":
        monkeypatch.setattr("pagedvllm.worker.cuda_graph.StaticBatch", Rebinding)
    elif kept == "lengths":
        settings = TAPED | {"attention_backend": f"{ME}:FrozenLengths"}
    else:
        kind = type("Kept", (Forgetting,), {"kept": property(lambda self: kept, lambda self, value: None)})
        monkeypatch.setattr("pagedvllm.worker.cuda_graph.StaticBatch", kind)
    assert tokens(LLM(str(tiny), **settings)) != expected


# ---------------------------------------------------------------- the worker


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cudagraph_recorder": "auto"}, "device cpu has none"),
        ({"enforce_eager": True}, "enforce_eager is set"),
        ({"worker_cls": "eager"}, ""),
    ],
    ids=str,
)
def test_without_graphs(
    tiny: Path, expected: list[list[int]], settings: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagedvllm"):
        llm = LLM(str(tiny), **{**TAPED, **settings})
    assert not isinstance(model_of(llm), GraphedModel)
    assert (f"no CUDA graphs: {why}" in caplog.text) == bool(why)
    assert tokens(llm) == expected


def test_an_attention_that_cannot_be_recorded(tiny: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cudagraph_recorder 'tape' cannot record: attention_backend 'torch' computes"
    ):
        LLM(str(tiny), **{**TAPED, "attention_backend": "torch"})


def test_on_a_gpu_the_torch_backend_runs_eagerly_and_says_so(tiny: Path) -> None:
    made = SimpleNamespace(config=EngineConfig.create(), torch_device=torch.device("cuda"))
    why = GraphWorker.why_eager(cast("Any", made), TorchPagedAttention([], 1, 1, torch.float32, CPU))
    assert why == "attention_backend 'torch' computes with a step's numbers on the host"
    assert GraphWorker.why_eager(cast("Any", made), PlanningTorchAttention([], 1, 1, torch.float32, CPU)) == ""


LIMITS = BatchLimits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64, block_size=4)


def on_card(tiny: Path, monkeypatch: pytest.MonkeyPatch, card: Card, **settings: Any) -> GraphWorker:
    monkeypatch.setattr(worker, "device_memory", lambda device: card)
    return GraphWorker(EngineConfig.create(model=str(tiny), device="cpu", **{**TAPED, **settings}))


def test_the_cache_leaves_room_for_graphs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is what they then take, and nothing of the measurement stays."""
    with Card(16 * MIB) as card:
        w = on_card(tiny, monkeypatch, card, num_gpu_blocks_override=None)
        available = w.determine_available_memory(LIMITS)
        profile = w.memory_profile
        assert profile is not None and profile.graphs > 10_000 and profile.kv == available
        assert (
            sum((profile.weights, profile.activations, profile.other, profile.graphs, available)) == profile.requested
        )
        assert card.live == profile.weights
        plain = on_card(tiny, monkeypatch, card, num_gpu_blocks_override=None, enforce_eager=True)
        assert plain.determine_available_memory(LIMITS) == available + profile.graphs
        del plain
        before = card.live
        worker.Worker.initialize_cache(w, 5, LIMITS)
        without = card.live
        del w.runner
        assert card.live == before
        w.initialize_cache(5, LIMITS)
        assert card.live - without == profile.graphs


def test_graphs_that_do_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Card(2 * MIB) as card:
        w = on_card(tiny, monkeypatch, card)
        worker.Worker.initialize_cache(w, 5, LIMITS)
        card.others = card.total - card.live - 20_000
        with pytest.raises(ValueError) as error:
            w.record_graphs(w.runner, LIMITS)
        assert str(error.value).startswith(
            "CUDA graphs of 4 batch sizes, up to 6, do not fit into 0.0 MiB, which are free"
        )
        assert "set enforce_eager=True" in str(error.value)


def test_the_recorder_is_found_by_name(tiny: Path) -> None:
    llm = LLM(str(tiny), **{**TAPED, "cudagraph_recorder": f"{ME}:CountingRecorder", "cudagraph_capture_sizes": [2]})
    assert CountingRecorder.made == 1 and sorted(model_of(llm).graphs) == [2]
    assert graph_worker.GRAPH_RECORDERS["cuda"].endswith("CudaGraphRecorder")


class CountingRecorder(TapeRecorder):
    made = 0

    def record(self, function: Callable[[], Tensor]) -> Any:
        CountingRecorder.made += 1
        return super().record(function)
