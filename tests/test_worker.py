"""Where memory goes, the largest step, and a worker that measures: on a card simulated by counting real tensors."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pagedvllm import LLM, SamplingParams
from pagedvllm.config import EngineConfig, ModelConfig
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.kv.sizing import num_kv_blocks
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.model.loader import load_model
from pagedvllm.worker import memory, worker
from pagedvllm.worker.memory import CudaMemory, HostMemory, MemoryProfile, MemorySnapshot
from pagedvllm.worker.profile import (
    AllocationCounter,
    count_activations,
    largest_steps,
    model_without_weights,
    weight_bytes,
)
from pagedvllm.worker.worker import Worker
from tests.conftest import save_checkpoint

GIB, MIB = 2**30, 2**20
CPU, META = torch.device("cpu"), torch.device("meta")
LIMITS = BatchLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, block_size=16)

# ---------------------------------------------------------------- the formula


def test_the_formula_on_the_example_of_a_card():
    """24 GiB, 1 of them held by others; weights 8, a context and workspaces 0.5, activations 2 at their peak."""
    before = MemorySnapshot(24 * GIB, 23 * GIB)
    after = MemorySnapshot(24 * GIB, 23 * GIB - 8 * GIB - GIB // 2, 8 * GIB, 10 * GIB)
    requested = memory.requested_memory(24 * GIB, 0.75)
    assert requested == 18 * GIB
    assert memory.available_kv_bytes(requested, before, after) == 18 * GIB - 8 * GIB - GIB // 2 - 2 * GIB
    assert memory.available_kv_bytes(requested, before, after, graphs=GIB) == 6 * GIB + GIB // 2
    parts = MemoryProfile.of(requested, 8 * GIB, before, after, graphs=GIB)
    assert (parts.weights, parts.activations, parts.other, parts.kv) == (8 * GIB, 2 * GIB, GIB // 2, 6 * GIB + GIB // 2)
    assert parts.weights + parts.activations + parts.other + parts.graphs + parts.kv == parts.requested
    assert "weights 8.00 GiB, activations 2.00 GiB" in str(parts)


def test_requested_memory_is_rounded_up():
    assert memory.requested_memory(1001, 0.5) == 501


def test_it_may_be_less_than_nothing():
    before, after = MemorySnapshot(100, 100), MemorySnapshot(100, 20, 80, 85)
    assert memory.available_kv_bytes(50, before, after) == -35


def test_memory_that_others_release_meanwhile_is_an_error():
    with pytest.raises(RuntimeError, match=r"grew from 1\.00 GiB to 2\.00 GiB.*another process"):
        MemoryProfile.of(GIB, 0, MemorySnapshot(4 * GIB, GIB), MemorySnapshot(4 * GIB, 2 * GIB))


@pytest.mark.parametrize(("total", "free", "share"), [(1000, 900, 100), (1000, 150, 75), (1000, 0, 0)])
def test_the_share_of_ram(total, free, share):
    assert memory.cpu_kv_bytes(MemorySnapshot(total, free)) == share


def test_this_machines_memory(monkeypatch, tmp_path):
    real = HostMemory().snapshot()
    assert 0 < real.free <= real.total
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMITS", (str(tmp_path / "absent"), str(limit)))
    limit.write_text("max\n")
    assert HostMemory().snapshot().total >= real.total
    limit.write_text(f"{64 * MIB}\n")
    assert HostMemory().snapshot() == MemorySnapshot(64 * MIB, 64 * MIB)


def test_a_system_that_does_not_say_what_is_available(monkeypatch):
    monkeypatch.setattr(memory.os.path, "exists", lambda path: False)
    ram = HostMemory().snapshot()
    assert ram.free == ram.total


def test_a_gpus_memory_as_driver_and_allocator_tell_it(monkeypatch):
    calls = []
    stats = {"allocated_bytes.all.current": 30, "allocated_bytes.all.peak": 40, "reserved_bytes.all.current": 99}
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (60, 100),
        "memory_stats": stats,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, n=name, v=value: calls.append(n) or v)
    card = memory.device_memory(torch.device("cuda:0"))
    assert isinstance(card, CudaMemory) and card.counts_tensors
    assert card.snapshot() == MemorySnapshot(total=100, free=60, torch_allocated=30, torch_peak=40)
    assert calls.index("empty_cache") < calls.index("mem_get_info"), "torch's reserve must count as free"
    card.reset_peak()
    assert calls[-1] == "reset_peak_memory_stats"
    assert isinstance(memory.device_memory(CPU), HostMemory)


# ---------------------------------------------------------------- counting


def decoder(device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> DecoderForCausalLM:
    fields: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
    }
    model = DecoderForCausalLM(DecoderConfig(**(fields | changes)), 512, Build(dtype, device)).eval()
    if device.type != "meta":
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
    return model


def test_the_counter_sees_tensors_come_and_go():
    old = torch.ones(100)
    with AllocationCounter() as counter:
        a = torch.zeros(1000)  # 4000 bytes
        view = a[10:20].view(2, 5)
        old.add_(1)
        old[:10].mul_(2)
        assert (counter.live, counter.peak) == (4000, 4000)
        b = (a + 1) * 2  # the sum is gone again
        assert (counter.live, counter.peak) == (8000, 12000)
        del a
        assert counter.live == 8000, "a view keeps its storage"
        del view, b
        assert (counter.live, counter.peak) == (0, 12000)


def test_an_operation_made_of_others_is_counted_inside():
    q, k = torch.ones(8, 4, 16), torch.ones(8, 4, 16)
    with AllocationCounter() as counter:
        scores = torch.einsum("qhd,khd->hqk", q.transpose(0, 1).contiguous().transpose(0, 1), k)
    assert counter.peak > scores.nbytes + 8 * 4 * 16 * 4 - 1


def peak_by_profiler(model: DecoderForCausalLM, num_tokens: int, num_seqs: int) -> int:
    """What torch's allocator says of the same code on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        count_activations(model, num_tokens, num_seqs)
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"architecture": "LlamaForCausalLM", "qk_norm": False, "tie_word_embeddings": False, "o_bias": True}],
)
@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(512, 1), (512, 64), (128, 128)])
def test_the_count_is_what_the_allocator_says(changes, dtype, num_tokens, num_seqs):
    real = decoder(CPU, dtype, **changes)
    counted = count_activations(decoder(META, dtype, **changes), num_tokens, num_seqs)
    assert counted == count_activations(real, num_tokens, num_seqs)
    assert counted == pytest.approx(peak_by_profiler(real, num_tokens, num_seqs), rel=0.01)


def test_the_count_of_a_large_model_takes_no_memory():
    """Llama-3.1-8B: 8192 tokens, of which 256 are sampled."""
    llama = decoder(
        META,
        torch.bfloat16,
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        qk_norm=False,
    )
    assert weight_bytes(llama) == 2 * 8_030_261_248
    by_tokens, by_rows = count_activations(llama, 8192, 1), count_activations(llama, 256, 256)
    # The MLP: gate and up [T, 2 * I], then silu(gate) [T, I] and the product [T, I]; beside them a few of [T, hidden].
    assert 8192 * 4 * 14336 * 2 < by_tokens < 8192 * (4 * 14336 + 5 * 4096) * 2
    assert by_rows > 8 * 256 * 128256 * 4, "a sort of the logits takes several times their size"
    assert max(by_tokens, by_rows) <= count_activations(llama, 8192, 256) <= by_tokens + by_rows
    assert count_activations(llama, 16384, 1) == pytest.approx(2 * by_tokens, rel=0.01)


def test_a_model_without_weights_is_the_model_that_is_loaded(tmp_path):
    for variant in ("llama", "llama-tied", "qwen2", "qwen3-bias"):
        save_checkpoint(tmp_path / variant, variant)
        for settings in (ModelConfig(), ModelConfig(dtype="bfloat16", max_model_len=50)):
            empty = model_without_weights(tmp_path / variant, settings, CPU)
            real = load_model(tmp_path / variant, settings, CPU)
            assert weight_bytes(empty) == weight_bytes(real) > 0
            assert empty.max_model_len == real.max_model_len
            assert all(p.is_meta for p in empty.parameters())


# ---------------------------------------------------------------- the largest step


@pytest.mark.parametrize(
    ("seqs", "tokens", "longest", "fewest", "most", "computed"),
    [
        (8, 64, 128, 1, 8, 64),
        (8, 64, 20, 4, 8, 64),
        (8, 512, 20, 8, 8, 8 * 19),  # all that eight requests can have
        (1, 64, 128, 1, 1, 64),
        (256, 16, 128, 1, 16, 16),  # no more requests than tokens
        (3, 3, 1, 3, 3, 3),
        (1, 1, 1, 1, 1, 1),
    ],
)
def test_the_largest_steps(seqs, tokens, longest, fewest, most, computed):
    few, many = largest_steps(BatchLimits(seqs, tokens, longest, 4))
    assert (len(few.num_scheduled_tokens), len(many.num_scheduled_tokens)) == (fewest, most)
    assert many.finished_req_ids == list(few.num_scheduled_tokens), "their rows are free again"
    for step in (few, many):
        assert step.total_num_scheduled_tokens == computed
        for i, new in enumerate(step.scheduled_new_reqs):
            name, length = new.request_id, len(new.token_ids)
            assert step.num_scheduled_tokens[name] > 0
            assert step.num_computed_tokens[name] + step.num_scheduled_tokens[name] == length, "all are sampled"
            assert length <= max(longest - 1, 1) and (i or length == max(longest - 1, 1))
            assert step.new_block_ids[name] == [0] * -(-length // 4)
            assert not new.params.greedy and new.params.top_p < 1, "as costly as sampling gets"


# ---------------------------------------------------------------- a worker on a card


class Card(AllocationCounter):
    """A GPU as far as memory goes: it counts this process's tensors, and has no more than it has."""

    counts_tensors = True

    def __init__(self, total: int, others: int = 0, workspace: int = 0) -> None:
        super().__init__()
        self.total, self.others, self.workspace = total, others, workspace
        self.steps = 0

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":  # on no card
            return
        super()._add(storage)
        if self.live > self.total - self.others:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def snapshot(self) -> MemorySnapshot:
        self.steps += 1
        taken = self.others + self.live + (self.workspace if self.steps > 1 else 0)  # libraries, from the first use on
        return MemorySnapshot(self.total, self.total - taken, self.live, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.live


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, embedded) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_checkpoint(path, "llama")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture
def on(monkeypatch, checkpoint):
    """A worker on a card, which it takes for its device's."""

    def make(card: Card | HostMemory, **settings: Any) -> Worker:
        monkeypatch.setattr(worker, "device_memory", lambda device: card)
        return Worker(EngineConfig.create(model=str(checkpoint), device="cpu", **settings))

    return make


@pytest.mark.parametrize("runner", ["simple", "default"])
def test_what_is_measured_is_what_a_step_then_takes(on, runner):
    """With the cache made as large as the worker says, the largest step fits, and takes just what was requested."""
    with Card(16 * MIB, others=MIB, workspace=MIB // 2) as card:
        w = on(card, gpu_memory_utilization=0.75, runner_cls=runner)
        available = w.determine_available_memory(LIMITS)
        parts = w.memory_profile
        assert parts is not None and parts.kv == available
        assert parts.requested == 12 * MIB and parts.other == MIB // 2
        rotary = 128 * 8 * 4
        assert parts.weights == weight_bytes(w.model) + rotary
        assert parts.weights + parts.activations + parts.other + parts.kv == parts.requested
        assert card.live == parts.weights, "nothing of the profile run stays"
        num_blocks = num_kv_blocks(w.config.cache, available, w.page_bytes)
        w.initialize_cache(num_blocks, LIMITS)
        card.reset_peak()
        for step in largest_steps(LIMITS):
            assert all(len(tokens) == 1 for tokens in w.execute(step).sampled)
        assert card.peak + card.workspace <= parts.requested
        assert card.peak + card.workspace > parts.requested - 2 * w.page_bytes - 16 * 1024


def test_activations_hold_attention_and_buffers_as_well(on):
    """More than the model's own tensors; and they grow with each limit that a step depends on."""
    with Card(64 * MIB) as card:
        w = on(card)

        def activations(**changes: int) -> int:
            limits = BatchLimits(**({**vars(LIMITS)} | changes))
            w.determine_available_memory(limits)
            assert w.memory_profile is not None
            return w.memory_profile.activations

        base = activations()
        own = count_activations(w.model, 64, 8)
        assert base > own > 0
        assert activations() == base, "deterministic"
        assert activations(max_num_batched_tokens=128) > 1.5 * base
        assert activations(max_num_seqs=64) > base
        assert activations(max_model_len=32) < base


def test_a_card_that_others_hold(on):
    with Card(16 * MIB, others=12 * MIB) as card, pytest.raises(ValueError) as error:
        on(card)
    message = str(error.value)
    assert "gpu_memory_utilization 0.92 asks for 14.7 MiB of 16.0 MiB" in message
    assert "4.0 MiB are free, 10.7 MiB too little: other processes and the driver hold 12.0 MiB" in message
    assert "Lower gpu_memory_utilization to at most 0.25" in message and "earlier LLM" not in message
    with Card(16 * MIB, others=12 * MIB) as card:  # what it advises works
        assert on(card, gpu_memory_utilization=0.25).determine_available_memory(LIMITS) > 0


def test_a_card_that_an_earlier_engine_holds(on):
    with Card(16 * MIB) as card:
        earlier = torch.zeros(MIB)
        with pytest.raises(ValueError, match=r"tensors of this process 4\.0 MiB \(an earlier LLM\? delete it\)"):
            on(card)
        del earlier
        on(card)


def test_weights_that_do_not_fit(on):
    with Card(16 * MIB, others=16 * MIB - 50_000) as card, pytest.raises(ValueError) as error:
        on(card, gpu_memory_utilization=0.002)
    message = str(error.value)
    assert message.startswith("the weights of tiny-llama need 0.1 MiB, but of 16.0 MiB 0.0 MiB are free on cpu")
    assert "are missing. Choose a smaller model, or a dtype of fewer bytes" in message


def test_nothing_is_left_for_the_cache(on):
    with Card(16 * MIB) as card:
        w = on(card, gpu_memory_utilization=0.02)
        with pytest.raises(ValueError) as error:
            w.determine_available_memory(LIMITS)
    message = str(error.value)
    assert "no memory is left for the KV cache, 0.3 MiB are missing: of 16.0 MiB the engine may use 0.3 MiB" in message
    assert "Raise gpu_memory_utilization (0.02), or lower max_num_batched_tokens (64), max_num_seqs (8)" in message


def test_a_step_that_does_not_fit(on):
    with Card(MIB) as card:
        w = on(card)
        weights = card.live
        with pytest.raises(ValueError) as error:
            w.determine_available_memory(BatchLimits(8, 127, 128, 16))
        assert error.value.__context__ is None and card.live == weights, "the failed step holds no memory"
        message = str(error.value)
        assert message.startswith("the largest step does not fit into 0.9 MiB, which are free once the weights are")
        assert "Lower max_num_batched_tokens (127), max_num_seqs (8) or max_model_len (128: the torch" in message
        assert w.determine_available_memory(LIMITS) > 0


def test_another_process_lets_go_meanwhile(on):
    with Card(16 * MIB, others=2 * MIB) as card:
        w = on(card, gpu_memory_utilization=0.5)
        card.others = 0
        with pytest.raises(RuntimeError, match="another process released some"):
            w.determine_available_memory(LIMITS)


# ---------------------------------------------------------------- sizes said by hand, and computers


def test_a_size_said_by_hand_overrides(on):
    """And nobody asks whether a share of the card is free."""
    with Card(16 * MIB, others=12 * MIB) as card:
        for device in (card, HostMemory()):
            w = on(device, kv_cache_memory_bytes=MIB)
            assert w.determine_available_memory(LIMITS) == MIB and w.memory_profile is None
            w = on(device, num_gpu_blocks_override=10, kv_cache_memory_bytes=2**50)
            assert w.determine_available_memory(LIMITS) == 10 * w.page_bytes


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_size_said_by_hand_that_does_not_fit(on, setting):
    with Card(16 * MIB, others=12 * MIB) as card:
        for device, free in ((card, r"3\.9 MiB"), (HostMemory(), r"\d+\.\d\d GiB")):
            w = on(device, **{setting: 2**50})
            message = (
                rf"{setting} {2**50} asks for \d+\.00 GiB, but {free} are free once the weights are loaded: .* miss"
            )
            with pytest.raises(ValueError, match=message):
                w.determine_available_memory(LIMITS)


def test_a_cache_that_does_not_fit(on):
    with Card(4 * MIB) as card:
        w = on(card)
        with pytest.raises(ValueError) as error:
            w.initialize_cache(10_000, LIMITS)
        message = str(error.value)
        assert message.startswith("a KV cache of 10000 blocks needs 39.1 MiB")
        assert "but 3.9 MiB are free on cpu. Lower num_gpu_blocks_override, kv_cache_memory_bytes or" in message


def test_a_cache_that_fits_in_sum_but_not_in_fact(on):
    """The driver's free memory may lie in pieces, or somebody else may take it first."""
    with Card(4 * MIB) as card:
        w = on(card)
        live, snapshot = card.live, card.snapshot()
        card.others = 4 * MIB - live - 100_000
        card.snapshot = lambda: snapshot  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"a KV cache of 100 blocks needs 0\.4 MiB") as error:
            w.initialize_cache(100, LIMITS)
        assert error.value.__context__ is None and card.live == live


class Computer(HostMemory):
    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(40 * MIB, 30 * MIB)


def test_a_computer_gives_a_share_and_says_so(on, caplog):
    w = on(Computer())
    limits = BatchLimits(256, 4096, 128, 16)
    with caplog.at_level(logging.INFO, "pagedvllm"):
        assert w.determine_available_memory(limits) == 4 * MIB
    assert "4.0 MiB for the KV cache: a share of 40.0 MiB of RAM (30.0 MiB are available), not a measure" in caplog.text
    assert w.memory_profile is None
    most = (1 + 2 * 8) * w.page_bytes  # two requests of eight blocks, and the null block
    assert w.determine_available_memory(BatchLimits(2, 4096, 128, 16)) == most < 4 * MIB


def test_a_share_of_a_computer_is_refused(on):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is for GPUs.*set kv_cache_memory_bytes"):
        on(Computer(), gpu_memory_utilization=0.5)


def test_a_gpu_that_is_not_there(monkeypatch, on):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device cuda:2 was asked for, but there are 2 GPUs"):
        Worker(EngineConfig.create(device="cuda:2"))


def test_the_worker_is_one_of_the_engines(on):
    with Card(16 * MIB) as card:
        w = on(card, dtype="bfloat16", block_size=8, max_model_len=100)
        assert (w.device.kind, w.max_model_len) == ("cpu", 100)
        assert w.page_bytes == 2 * 2 * 2 * 8 * 8 * 2  # layers, k and v, heads, head size, tokens, bytes
        with pytest.raises(ValueError, match="tiny-llama"):
            on(card, max_model_len=129)


# ---------------------------------------------------------------- the whole engine


@pytest.mark.parametrize("runner", ["simple", "default"])
def test_an_engine_on_a_card_answers_as_the_reference_does(monkeypatch, checkpoint, runner):
    """Its blocks are measured and soon all in use; and no step asks for more memory than there is."""
    rng, limits = random.Random(0), {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    prompts = [[rng.randrange(3, 100) for _ in range(rng.randrange(20, 40))] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    expected = LLM(str(checkpoint), engine="reference").generate(prompts, params)
    card = Card(300 * 1024)
    monkeypatch.setattr(worker, "device_memory", lambda device: card)
    with card:
        settings = {"worker_cls": "default", "runner_cls": runner, "scheduler_cls": "recording", **limits}
        llm = LLM(str(checkpoint), device="cpu", gpu_memory_utilization=0.95, **settings)
        card.reset_peak()
        found = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    trace = llm.engine.core.scheduler.trace  # type: ignore[attr-defined]
    assert sum(len(line["preempted"]) for line in trace) > 0
    assert card.peak <= 0.95 * card.total
