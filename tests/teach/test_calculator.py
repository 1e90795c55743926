"""The memory calculator: its numbers are the engine's own, and its bytes the same each time."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedvllm import teach
from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.sched.limits import GIB, Device
from pagedvllm.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedvllm.teach.memory_calculator import summary
from pagedvllm.teach.memory_plan import DTYPES, GPUS, MODELS, PROBLEMS, needs_of
from pagedvllm.worker import worker
from pagedvllm.worker.memory import MemorySnapshot
from pagedvllm.worker.profile import AllocationCounter, count_activations, weight_bytes

META = torch.device("meta")
PARAMETERS = {  # as the checkpoints' own indexes say, in bytes / 2
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-14B": 14_770_033_664,
    "Llama-3.1-70B": 70_553_706_496,
}

# ---------------------------------------------------------------- what a model needs


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_cache_of_the_presets(name):
    config, needs = MODELS[name], needs_of(MODELS[name], torch.bfloat16)
    assert needs.weights == 2 * PARAMETERS[name]
    assert needs_of(config, torch.float32).weights == 4 * PARAMETERS[name]
    assert needs.kv == config.kv_bytes_per_token(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_two_affine_functions_give_each_count(name, dtype):
    """Fitted on five steps of one layer; exact for other steps, and for more layers."""
    needs = needs_of(MODELS[name], dtype)
    model = DecoderForCausalLM(replace(MODELS[name], num_layers=2), 1, Build(dtype, META))
    for tokens, rows in ((8192, 256), (16384, 1024), (300, 7), (8192, 40), (5, 9)):
        assert needs.peak(tokens, rows) == count_activations(model, tokens, rows), (tokens, rows)


def test_a_whole_model():
    needs = needs_of(MODELS["Qwen3-0.6B"], torch.float16)
    model = DecoderForCausalLM(MODELS["Qwen3-0.6B"], 1000, Build(torch.float16, META))
    assert weight_bytes(model) == needs.weights
    assert model.attention_specs()[0].cos_sin.nbytes == 1000 * needs.table
    for tokens, rows in ((8192, 1), (8192, 256)):
        assert needs.peak(tokens, rows) == count_activations(model, tokens, rows)


# ---------------------------------------------------------------- the engine on a card that is not there


class Card(AllocationCounter):
    """A GPU as far as memory goes: it counts tensors on the meta device, weights too, and libraries take their part."""

    counts_tensors = True

    def __init__(self, total: int, used_before: int, non_torch: int) -> None:
        super().__init__()
        self.total, self.others, self.workspace = total, used_before, non_torch

    def snapshot(self) -> MemorySnapshot:
        shot = MemorySnapshot(self.total, self.total - self.others - self.live, self.live, self.peak)
        self.others, self.workspace = self.others + self.workspace, 0  # from the first use on
        return shot

    def reset_peak(self) -> None:
        self.peak = self.live


class FusedRunner:
    """Runs a step's tensors without their data; attention keeps nothing but its result."""

    def __init__(self, model: DecoderForCausalLM, attention: Any, ops: Any, limits: BatchLimits, seed: int) -> None:
        self.model, self.ops = model, ops

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        count_activations(self.model, output.total_num_scheduled_tokens, len(output.num_scheduled_tokens), self.ops)
        return ModelRunnerOutput([], [])


@pytest.fixture
def blocks_of(monkeypatch, tmp_path):
    """The number of blocks with which an engine starts, with a preset model on a GPU."""

    def start(model: str, gpu: str, **changes: Any) -> int:
        s = teach.plan(model, gpu, **changes).settings
        assert s.max_model_len
        config, build = MODELS[model], Build(DTYPES[s.dtype], META)
        made = lambda *_: DecoderForCausalLM(config, s.max_model_len or 0, build)  # noqa: E731
        card = Card(GPUS[gpu].memory, s.used_before, s.non_torch)
        monkeypatch.setattr(worker, "device_memory", lambda device: card)
        monkeypatch.setattr(worker, "resolve_model", lambda *_, **__: tmp_path)
        monkeypatch.setattr(worker, "model_without_weights", made)
        monkeypatch.setattr(worker, "load_model", made)
        names = ("gpu_memory_utilization", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        settings = {name: getattr(s, name) for name in names} | {"worker_cls": "eager"}
        with card:
            core = EngineCore(EngineConfig.create(device="meta", runner_cls=f"{__name__}:FusedRunner", **settings))
        return core.scheduler.kv.num_blocks

    return start


FITTING = [
    ("SmolLM2-135M", "T4 16 GB", {"dtype": "float32", "gpu_memory_utilization": 0.5}),
    ("Qwen3-0.6B", "T4 16 GB", {"dtype": "float16"}),
    ("Qwen3-0.6B", "L4 24 GB", {"block_size": 32, "max_model_len": 10, "max_num_seqs": 64}),
    ("Qwen2.5-7B", "RTX 4090 24 GB", {"max_num_batched_tokens": 2048, "max_model_len": 16384, "block_size": 128}),
    ("Llama-3.1-8B", "A100 80 GB", {"gpu_memory_utilization": 0.73, "non_torch": GIB, "used_before": 3 * GIB}),
    ("Llama-3.1-8B", "H100 80 GB", {}),
    ("Qwen2.5-14B", "H200 141 GB", {"block_size": 7, "max_num_seqs": 33}),
]


@pytest.mark.parametrize(("model", "gpu", "settings"), FITTING)
def test_the_engine_starts_with_as_many_blocks(blocks_of, model, gpu, settings):
    plan = teach.plan(model, gpu, **settings)
    assert plan.problem == "" and plan.num_blocks > 100
    assert blocks_of(model, gpu, **settings) == plan.num_blocks


REFUSED = [
    ("start", "SmolLM2-135M", "T4 16 GB", {"gpu_memory_utilization": 0.99}, "asks for"),
    ("weights", "Llama-3.1-8B", "T4 16 GB", {}, "the weights of .* need 14.96 GiB"),
    ("nothing", "Qwen2.5-14B", "H100 80 GB", {"gpu_memory_utilization": 0.3}, "no memory is left"),
    ("long", "Llama-3.1-8B", "RTX 4090 24 GB", {"max_num_seqs": 32}, "max_model_len 131072 does not fit"),
    ("budget", "Qwen3-0.6B", "T4 16 GB", {"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
]


@pytest.mark.parametrize(("problem", "model", "gpu", "settings", "message"), REFUSED)
def test_the_engine_refuses_what_the_plan_calls_a_problem(blocks_of, problem, model, gpu, settings, message):
    assert teach.plan(model, gpu, **settings).problem == problem
    with pytest.raises(ValueError, match=message):
        blocks_of(model, gpu, **settings)


def test_the_longest_that_fits_is_the_engines(blocks_of):
    """What the plan says fits does; one token more does not."""
    args = ("Llama-3.1-8B", "RTX 4090 24 GB")
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
    most = teach.plan(*args, max_model_len=131072, **settings).usable_tokens
    assert blocks_of(*args, max_model_len=most, **settings) > most // 16
    # A shorter rotary table leaves a few blocks more.
    more = teach.plan(*args, max_model_len=most, **settings).usable_tokens + 1
    with pytest.raises(ValueError, match=f"max_model_len {more} does not fit"):
        blocks_of(*args, max_model_len=more, **settings)


# ---------------------------------------------------------------- the formula by hand


def test_by_hand():
    """Qwen3-0.6B on a card of 16 GiB, worked out on paper."""
    needs = needs_of(MODELS["Qwen3-0.6B"], torch.bfloat16)
    card = Device("cuda", "paper", 16 * GIB)
    plan = teach.plan(
        MODELS["Qwen3-0.6B"], card, gpu_memory_utilization=0.5, max_model_len=1000, non_torch=GIB, cuda_graphs=GIB
    )
    assert plan.requested == 8 * GIB
    assert plan.weights == 2 * 596_049_920 + 1000 * 128 * 4
    assert plan.activations == needs.peak(8192, 256)
    assert plan.page_bytes == 16 * 28 * 2 * 8 * 128 * 2
    assert plan.available == 6 * GIB - plan.weights - plan.activations
    assert plan.num_blocks == plan.available // plan.page_bytes > 0
    assert plan.blocks_per_request == 63
    assert plan.concurrency == plan.num_blocks / 63
    assert plan.usable_tokens == 16 * (plan.num_blocks - 1)
    assert (
        plan.total
        == 16 * GIB
        == sum((plan.weights, plan.activations, 2 * GIB, plan.kv_cache, plan.settings.used_before, plan.unused))
    )


def test_defaults_are_the_engines():
    for gpu, limits in {"T4 16 GB": (256, 8192), "A100 80 GB": (256, 8192), "H100 80 GB": (1024, 16384)}.items():
        settings = teach.plan("Qwen3-0.6B", gpu).settings
        assert (settings.max_num_seqs, settings.max_num_batched_tokens) == limits
        assert (settings.max_model_len, settings.gpu_memory_utilization, settings.block_size) == (40960, 0.92, 16)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "GPT-2"}, ValueError, "model must be one of SmolLM2-135M, .*; got 'GPT-2'"),
        ({"gpu": "V100"}, ValueError, "gpu must be one of T4 16 GB, .*; got 'V100'"),
        ({"dtype": "int4"}, ValueError, "dtype must be one of"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization must be between 0 and 1"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"non_torch": -1}, ValueError, "non_torch must be at least 0"),
        ({"max_model_len": "long"}, TypeError, "max_model_len must be int or None"),
        ({"utilisation": 0.5}, TypeError, "utilisation"),
    ],
)
def test_says_what_is_wrong(settings, error, message):
    with pytest.raises(error, match=message):
        teach.calculator(**settings)


# ---------------------------------------------------------------- the element


def test_equal_arguments_give_equal_bytes_that_ask_nobody():
    one, two = (teach.calculator("Qwen3-0.6B", "T4 16 GB")._repr_mimebundle_() for _ in range(2))
    assert one == two
    assert list(one) == ["text/html", "text/plain"]
    assert len(one["text/html"]) < 35_000
    stored = json.loads(re.search(r'<script type="application/json">(.*?)</script>', one["text/html"], re.S)[1])
    assert stored["gpus"]["H200 141 GB"]["defaults"] == {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}
    assert not re.search(r"https?://|\bsrc=|@import|url\(|fetch\(|innerHTML|eval\(", one["text/html"])


def test_text():
    text = repr(teach.calculator("Llama-3.1-8B", "RTX 4090 24 GB", max_model_len=8192, max_num_seqs=32))
    start = "[memory calculator] Llama-3.1-8B, bfloat16, on RTX 4090 24 GB: of 23.64 GiB the engine may use 21.75 GiB:"
    assert text.startswith(start + " weights 14.96 GiB, activations")
    assert re.search(r"KV cache \d\.\d\d GiB, which is [\d,]+ blocks of 16 tokens; requests of 8,192 tokens: \d", text)
    for problem, model, gpu, settings, _ in REFUSED:
        assert summary(teach.plan(model, gpu, **settings)).endswith(f"It does not start: {PROBLEMS[problem]}")


def test_names_are_never_html():
    evil = "</script><img src=x onerror=alert(1)>\u2028"
    html = teach.calculator(evil, "me", models={evil: MODELS["Qwen3-0.6B"]}, gpus={"me": GPUS["T4 16 GB"]}).element()
    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    assert "\u2028" not in html.split("<script", 1)[1]
    stored = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert stored and json.loads(stored[1])["settings"]["model"] == evil


def test_the_names_stay_functions():
    """A submodule of the same name would replace one in the package."""
    teach.plan("Qwen3-0.6B", "T4 16 GB")
    assert "pagedvllm.teach.memory_calculator" in sys.modules
    assert callable(teach.calculator) and callable(teach.plan)
