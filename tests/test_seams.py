"""Each seam of the design takes another part: operations, attention, linear method, shards, engine."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

from pagedvllm.attention.base import AttentionSpec
from pagedvllm.attention.contiguous import ContiguousAttention, ContiguousMetadata
from pagedvllm.config import ModelConfig
from pagedvllm.forward_context import ForwardContext
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.linear import Linear, UnquantizedMethod
from pagedvllm.model.loader import load_model
from pagedvllm.ops import Ops, TorchOps
from pagedvllm.parallel_context import ParallelContext
from pagedvllm.plugins import resolve
from pagedvllm.reference import CachedSequence
from tests.conftest import save_checkpoint

CPU = torch.device("cpu")
IDS = [7, 3, 99, 15, 4, 4, 62, 1, 88]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    save_checkpoint(tmp_path, "llama-bias")
    yield tmp_path


def logits(model: DecoderForCausalLM) -> torch.Tensor:
    return CachedSequence(model, len(IDS)).forward(IDS)


class CountingOps(TorchOps):
    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __getattribute__(self, name: str):
        if name in vars(Ops) and not name.startswith("_"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return super().__getattribute__(name)


def test_all_small_operations_go_through_ops(checkpoint: Path) -> None:
    model, ops = load_model(checkpoint, ModelConfig(), CPU), CountingOps()
    CachedSequence(model, len(IDS), ops).forward(IDS)
    layers = model.config.num_layers
    assert ops.calls == {
        "add_rms_norm": 2 * layers + 1,  # rms_norm itself is inside it: counted once for each
        "rms_norm": 2 * layers + 1,
        "rotary": layers,
        "write_cache": layers,
        "silu_and_mul": layers,
    }


class LastTokenOnly:
    """An attention that looks at nothing but the token itself."""

    def forward(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        return v.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)


def test_attention_backend_is_swapped(checkpoint: Path) -> None:
    model = load_model(checkpoint, ModelConfig(), CPU)
    one, two = CachedSequence(model, 9), CachedSequence(model, 9)
    one.cache = two.cache = LastTokenOnly()  # type: ignore[assignment]
    assert torch.equal(one.forward([5, 6]), two.forward([9, 6]))  # what came before cannot matter
    assert not torch.equal(CachedSequence(model, 9).forward([5, 6]), CachedSequence(model, 9).forward([9, 6]))


class DoublingMethod(UnquantizedMethod):
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return super().apply(layer, x) * 2


def test_linear_method_is_swapped(checkpoint: Path) -> None:
    class Halved(DoublingMethod):
        def load(self, layer: Linear, name: str, rows: slice, value: torch.Tensor) -> None:
            super().load(layer, name, rows, value / 2 if name == "weight" else value)

    plain = logits(load_model(checkpoint, ModelConfig(), CPU))
    same = logits(load_model(checkpoint, ModelConfig(), CPU, method=Halved()))
    other = logits(load_model(checkpoint, ModelConfig(), CPU, method=DoublingMethod()))
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-5)
    assert not torch.allclose(other, plain, atol=1e-2)


class ThreadGroup(ParallelContext):
    """Ranks as threads: `all_reduce` meets at a barrier and sums what all of them brought."""

    shared: dict[int, torch.Tensor]
    barrier: Barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.shared[self.rank] = x
        self.barrier.wait()
        total = sum(self.shared[r] for r in range(self.size))
        self.barrier.wait()
        assert isinstance(total, torch.Tensor)
        return total


def test_two_shards_give_what_one_gives(checkpoint: Path) -> None:
    """Row-parallel biases included (nano-vllm issue 125: a bias added by every rank before the sum)."""
    plain = logits(load_model(checkpoint, ModelConfig(), CPU))
    results: dict[int, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    barrier = Barrier(2, timeout=30)

    def run(rank: int) -> None:
        group = ThreadGroup(rank, 2)
        object.__setattr__(group, "shared", shared)
        object.__setattr__(group, "barrier", barrier)
        model = load_model(checkpoint, ModelConfig(), CPU, parallel=group)
        assert model.model.layers[0].mlp.gate_up_proj.weight.shape == (48, 32)  # half of 2 * 48 rows
        assert model.attention_specs()[0].num_kv_heads == 1
        results[rank] = logits(model)

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        torch.testing.assert_close(results[rank], plain, rtol=0, atol=1e-5)


def test_indivisible_shards_are_named() -> None:
    with pytest.raises(ValueError, match=r"k_proj \(6\) does not divide by the tensor-parallel size \(4\)"):
        Linear(8, {"q_proj": 8, "k_proj": 6}, shard="column", parallel=ParallelContext(0, 4))


def test_several_sequences_in_one_flat_batch(checkpoint: Path) -> None:
    """Mixed lengths, no padding, rows in any order; padding is written nowhere; unused memory may be NaN."""
    model = load_model(checkpoint, ModelConfig(), CPU)
    prompts, room = [[7, 3, 99], [15], [4, 4, 62, 1]], 8
    cache = ContiguousAttention(model.attention_specs(), 3 * room, torch.float32, CPU)
    for pair in cache.caches:
        for tensor in pair:
            tensor.fill_(float("nan"))
    first_slots = [2 * room, 0, room]
    slots = torch.tensor([f + i for f, p in zip(first_slots, prompts, strict=True) for i in range(len(p))])
    positions = torch.tensor([i for p in prompts for i in range(len(p))])
    meta = ContiguousMetadata([0, 3, 4, 8], [3, 1, 4], slots, first_slots)
    ids = torch.tensor([t for p in prompts for t in p])
    hidden = model(ids, ForwardContext(positions, meta, cache, TorchOps()))
    got = model.logits(hidden[[2, 3, 7]])
    want = torch.cat([CachedSequence(model, 8).forward(p) for p in prompts])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    k_cache, v_cache = torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)
    TorchOps().write_cache(torch.ones(3, 1, 2), torch.ones(3, 1, 2), k_cache, v_cache, torch.tensor([1, -1, 2]))
    assert k_cache.sum((1, 2)).tolist() == v_cache.sum((1, 2)).tolist() == [0, 2, 2, 0]


def test_resolve_checks_the_protocol() -> None:
    assert resolve("pagedvllm.ops:TorchOps", Ops) is TorchOps  # type: ignore[type-abstract]
    for name, error, message in [
        ("pagedvllm.ops", ValueError, "not of the form"),
        ("pagedvllm.nowhere:X", ModuleNotFoundError, "no module pagedvllm.nowhere"),
        ("pagedvllm.nowhere.deeper:X", ModuleNotFoundError, "no module pagedvllm.nowhere.deeper"),
        ("pagedvllm.ops:X", ValueError, "has no X"),
        ("pagedvllm.sample.sampler:Sampler", TypeError, "is not a Ops: it lacks add_rms_norm"),
    ]:
        with pytest.raises(error, match=message):
            resolve(name, Ops)  # type: ignore[type-abstract]


def test_resolve_finds_what_a_notebook_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is `__main__`, which has no file of its own."""

    class Mine(TorchOps):
        pass

    notebook = types.ModuleType("__main__")
    notebook.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert resolve("__main__:Mine", Ops) is Mine  # type: ignore[type-abstract]
