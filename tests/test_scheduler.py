"""The scheduler against a worker that checks every row; its limits, its features, and what happens out of turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedvllm.config import SchedulerConfig
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.prefix_cache import PrefixCachingManager
from pagedvllm.kv.protocol import CountingKVCache, InvariantError
from pagedvllm.request import Request, RequestStatus
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.features import Admission, SchedulerFeature
from pagedvllm.sched.limits import GIB, Device, with_defaults
from pagedvllm.sched.output import EngineCoreOutput, SchedulerOutput
from pagedvllm.sched.recorder import RecordingScheduler
from pagedvllm.sched.scheduler import Scheduler
from tests.fake_worker import FakeWorker

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


class Engine:
    """A scheduler and a fake worker."""

    def __init__(
        self,
        num_blocks: int = 40,
        block_size: int = 4,
        kind: Any = PrefixCachingManager,
        max_model_len: int = 64,
        features: Sequence[SchedulerFeature] = (),
        **limits: Any,
    ) -> None:
        self.kv = kind(num_blocks, block_size)
        self.scheduler = Scheduler(replace(LIMITS, **limits), self.kv, max_model_len, features)
        self.worker = FakeWorker(block_size)
        self.seen: dict[str, Request] = {}
        self.errors: dict[str, str] = {}

    def add(self, name: str, tokens: list[int], max_tokens: int = 4, **kwargs: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        kwargs.setdefault("arrival_time", float(len(self.seen)))
        request = self.seen[name] = Request(name, tokens, params, **kwargs)
        self.worker.salts[name] = (request.cache_salt, request.lora_id)
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self.report(self.scheduler.update(output, self.worker.execute(output)))
        self.scheduler.check_invariants()
        return output

    def report(self, changes: list[EngineCoreOutput]) -> None:
        self.errors |= {change.request_id: change.error for change in changes if change.error}

    def run(self, most: int = 500) -> list[SchedulerOutput]:
        outputs = []
        while self.scheduler.has_requests():
            assert len(outputs) < most, "no end"
            outputs.append(self.step())
        assert self.kv.num_free_blocks == self.kv.num_blocks - 1
        return outputs


# ---------------------------------------------------------------- any order of calls


class Life(RuleBasedStateMachine):
    """Arrive, step, abort between any two calls, finish, preempt; equal prompts, tiny pools, two batches at once"""

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4]),
        kind=st.sampled_from([PrefixCachingManager, PrefixCachingManager, KVCacheManager, CountingKVCache]),
        policy=st.sampled_from(["fcfs", "priority"]),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        threshold=st.sampled_from([0, 0, 3]),
        watermark=st.sampled_from([0.0, 0.3]),
        whole=st.booleans(),
    )
    def start(
        self, num_blocks: int, block_size: int, kind: Any, policy: str, seqs: int, budget: int, threshold: int,
        watermark: float, whole: bool,
    ) -> None:  # fmt: skip
        self.engine = Engine(
            num_blocks, block_size, kind, max_model_len=24, policy=policy, max_num_seqs=seqs,
            max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, watermark=watermark,
            scheduler_reserve_full_isl=whole,
        )  # fmt: skip
        if kind is CountingKVCache:
            self.engine.worker.cell = lambda request_id, position: (request_id, position)  # type: ignore[method-assign,assignment,return-value]
        self.in_flight: list[SchedulerOutput] = []
        self.count = 0

    @rule(
        prompt=st.sampled_from([[1] * 3, [1] * 8, [1, 2] * 6, list(range(9)), list(range(17)), [5], [1] * 30]),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, priority: int, salt: str | None) -> None:
        self.count += 1
        self.engine.add(f"r{self.count}", prompt, max_tokens, priority=priority, cache_salt=salt)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        retracted = set(self.engine.scheduler._retracted_req_ids)
        output = self.engine.scheduler.schedule()
        limits = self.engine.scheduler
        assert retracted <= set(output.preempted_req_ids)  # the workers hear of them
        assert output.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert all(0 < n <= limits.threshold for n in output.num_scheduled_tokens.values())
        assert not (set(output.preempted_req_ids) - retracted and output.scheduled_new_reqs)
        self.in_flight.append(output)

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        output = self.in_flight.pop(0)
        self.engine.report(self.engine.scheduler.update(output, self.engine.worker.execute(output)))

    @precondition(lambda self: len(self.in_flight) == 1)
    @rule()
    def fail(self) -> None:
        output = self.in_flight.pop()
        with pytest.raises(RuntimeError):
            self.engine.worker.execute(output, fail=True)
        self.engine.scheduler.retract(output)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        assert [r.request_id for r in self.engine.scheduler.finish_requests([name, "unknown"])] == [name]

    @invariant()
    def books(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.in_flight:
            self.update()
        self.engine.run()
        for request in self.engine.seen.values():
            assert request.finished
            if request.status is RequestStatus.FINISHED_LENGTH_CAPPED:
                assert request.num_output_tokens == request.params.max_tokens or request.num_tokens == 24
            if request.status is RequestStatus.FINISHED_ERROR:
                assert request.error == self.engine.errors[request.request_id]


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_worker_sees_what_it_is_there_to_see() -> None:
    """The fake worker does fail: with vLLM's rule, a request reads a block that was announced and never filled."""

    def run(like_vllm: bool) -> Engine:
        engine = Engine(9, 4, policy="priority", scheduler_reserve_full_isl=False, long_prefill_token_threshold=8)
        engine.scheduler.like_vllm = like_vllm
        engine.add("victim", list(range(23)), max_tokens=1, priority=9)
        engine.step()
        engine.add("grower", [7] * 8, max_tokens=3, priority=0)
        engine.run()
        return engine

    engine = run(like_vllm=False)
    assert engine.seen["victim"].num_preemptions > 0
    with pytest.raises(AssertionError, match=r"victim\[16\] reads None"):
        run(like_vllm=True)


# ---------------------------------------------------------------- aborts, failures


@pytest.mark.parametrize("kind", [KVCacheManager, PrefixCachingManager, CountingKVCache])
def test_blocks_of_an_aborted_request_wait_for_its_batch(kind: Any) -> None:
    """mini-sglang issue 111: aborted between execute and update, freed twice."""
    engine = Engine(num_blocks=6, kind=kind)
    engine.add("a", [1] * 16)
    output = engine.scheduler.schedule()
    engine.scheduler.finish_requests(["a"])
    assert engine.kv.num_free_blocks == 1  # the batch still writes to them
    engine.add("b", [2] * 16)
    assert engine.scheduler.schedule().num_scheduled_tokens == {}
    result = engine.worker.execute(output) if kind is not CountingKVCache else None
    if result is not None:
        assert engine.scheduler.update(output, result) == []
        assert engine.kv.num_free_blocks == 5
        engine.run()
        assert engine.seen["b"].num_output_tokens == 4


def test_an_id_may_come_back_while_its_old_batch_is_in_flight() -> None:
    engine = Engine()
    engine.add("a", [1] * 5)
    output = engine.scheduler.schedule()
    engine.scheduler.finish_requests(["a"])
    again = engine.add("a", [2] * 5)
    assert engine.scheduler.update(output, engine.worker.execute(output)) == []
    assert again.num_output_tokens == 0
    engine.run()
    assert again.num_output_tokens == 4
    with pytest.raises(ValueError, match="request_id 'b' is in use"):
        engine.add("b", [1]), engine.add("b", [1])


def test_a_failed_step_is_done_again() -> None:
    """Also by the request that hit, in the failed step, blocks that the step was to fill."""
    engine = Engine()
    first, second = engine.add("a", [1] * 10), engine.add("b", [1] * 10)
    output = engine.scheduler.schedule()
    assert output.num_computed_tokens == {"a": 0, "b": 8}
    with pytest.raises(RuntimeError):
        engine.worker.execute(output, fail=True)
    engine.scheduler.retract(output)
    assert [r.request_id for r in engine.scheduler.waiting] == ["a", "b"] and not engine.scheduler.running
    assert engine.kv.lookup(first) == 0
    outputs = engine.run()
    assert outputs[0].resumed_req_ids == ["a", "b"] and first.output_token_ids == second.output_token_ids


def test_finish_needs_a_final_status() -> None:
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(ValueError, match="status must be a finished one, got RUNNING"):
        engine.scheduler.finish_requests(["a"], RequestStatus.RUNNING)
    engine.scheduler.finish_requests(["a", "a"], RequestStatus.FINISHED_ERROR)
    assert engine.step().finished_req_ids == ["a"] and not engine.scheduler.has_requests()


# ---------------------------------------------------------------- limits


def test_limits_that_contradict_each_other_are_named() -> None:
    for limits, message in [
        ({"max_num_seqs": None}, "must be set"),
        ({"max_num_batched_tokens": 7}, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
        ({"max_num_batched_tokens": 63, "enable_chunked_prefill": False}, "at least max_model_len"),
        ({"long_prefill_token_threshold": 65}, r"long_prefill_token_threshold \(65\) must be at most max_model_len"),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(**limits)


@pytest.mark.parametrize(
    ("device", "config", "expected"),
    [
        (Device("cpu"), {}, (256, 4096)),
        (Device("cuda", "NVIDIA H200", 141 * GIB), {}, (1024, 16384)),
        (Device("cuda", "NVIDIA B200", 180 * GIB), {}, (1024, 16384)),
        (Device("cuda", "NVIDIA A100-SXM4-80GB", 79 * GIB), {}, (256, 8192)),
        (Device("cuda", "Tesla T4", 15 * GIB), {}, (256, 8192)),
        (Device("cpu"), {"max_num_batched_tokens": 32}, (32, 32)),
        (Device("cpu"), {"max_num_seqs": 5000}, (5000, 5000)),
        (Device("cpu"), {"max_num_seqs": 5, "max_num_batched_tokens": 40}, (5, 40)),
        (Device("cpu"), {"enable_chunked_prefill": False}, (256, 8000)),
    ],
)
def test_defaults_by_device(device: Device, config: dict[str, Any], expected: tuple[int, int]) -> None:
    got = with_defaults(SchedulerConfig(**config), device, max_model_len=8000)
    assert (got.max_num_seqs, got.max_num_batched_tokens) == expected


# ---------------------------------------------------------------- features


class Scripted(SchedulerFeature):
    """Answers as told, and writes down what it hears."""

    def __init__(self, answers: dict[str, Admission] | None = None, extra: int = 0, keep: bool = False) -> None:
        self.answers, self.extra, self.keep = answers or {}, extra, keep
        self.heard: list[tuple[Any, ...]] = []

    def admit(self, request: Request) -> Admission:
        return self.answers.get(request.request_id, Admission.ADMIT)

    def extra_tokens(self, request: Request) -> int:
        return self.extra

    def scheduled(self, request: Request, num_tokens: int) -> None:
        self.heard.append(("scheduled", request.request_id, num_tokens))

    def received(self, request: Request, token_ids: Sequence[int]) -> None:
        self.heard.append(("received", request.request_id, len(token_ids)))

    def finished(self, request: Request) -> bool:
        self.heard.append(("finished", request.request_id))
        return self.keep


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_admission_skip_keeps_the_place_and_stop_ends_the_pass(policy: str) -> None:
    feature = Scripted({"b": Admission.SKIP, "d": Admission.STOP})
    engine = Engine(features=[feature], policy=policy)
    for name in "abcde":
        engine.add(name, [1, 2, 3])
    assert list(engine.step().num_scheduled_tokens) == ["a", "c"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "d", "e"]
    feature.answers = {}
    assert list(engine.step().num_scheduled_tokens) == ["a", "c", "b", "d", "e"]


def test_features_hear_of_everything_and_may_keep_blocks() -> None:
    feature, second = Scripted(keep=True), Scripted()
    engine = Engine(features=[feature, second])
    request = engine.add("a", [1] * 5, max_tokens=2)
    engine.step()
    engine.step()
    scheduled = [("scheduled", "a", 5), ("received", "a", 1), ("scheduled", "a", 1), ("received", "a", 1)]
    assert feature.heard == second.heard == [*scheduled, ("finished", "a")]
    assert engine.kv.num_free_blocks == 37 and not engine.scheduler.requests
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        engine.add("a", [1])
    engine.scheduler.release(request)
    assert engine.kv.num_free_blocks == 39
    engine.scheduler.check_invariants()


def test_guesses_are_scheduled_within_the_limits() -> None:
    engine = Engine(features=[Scripted(extra=3)], max_model_len=12, kind=KVCacheManager)
    engine.add("a", [1] * 9, max_tokens=3)
    assert engine.scheduler.schedule().num_scheduled_tokens == {"a": 9}  # a waiting request guesses nothing
    request = engine.seen["a"]
    request.token_ids.append(5)
    assert engine.scheduler.schedule().num_scheduled_tokens == {"a": 2}  # positions 9 and 10: 11 is only ever sampled


# ---------------------------------------------------------------- the books


def test_the_scheduler_names_what_is_wrong_with_its_own_books() -> None:
    def running() -> Engine:
        engine = Engine()
        engine.add("a", [1] * 5)
        engine.add("b", [1] * 5)
        engine.step()
        return engine

    def lost(e: Engine) -> None:
        e.scheduler.running.pop()

    def twice(e: Engine) -> None:
        e.scheduler.running.append(e.scheduler.running[0])

    def wrong_state(e: Engine) -> None:
        e.seen["a"]._status = RequestStatus.WAITING

    def too_far(e: Engine) -> None:
        e.seen["a"].num_computed_tokens = 99

    def too_many(e: Engine) -> None:
        e.scheduler.max_num_seqs = 1

    for mutate, message in [
        (lost, "only once"), (twice, "only once"), (wrong_state, "'a' is WAITING in the wrong queue"),
        (too_far, "'a' has computed 99 of 6 tokens"), (too_many, "2 requests run, max_num_seqs is 1"),
    ]:  # fmt: skip
        engine = running()
        mutate(engine)
        with pytest.raises(InvariantError, match=message):
            engine.scheduler.check_invariants()


def test_the_recorder_keeps_steps_apart_and_says_which_failed() -> None:
    engine = Engine()
    scheduler = RecordingScheduler(engine.scheduler.config, engine.kv, 64)
    engine.scheduler = scheduler
    engine.add("a", list(range(70))[:60], max_tokens=2)
    scheduler.max_num_batched_tokens = 32
    outputs = [scheduler.schedule(), scheduler.schedule()]  # two chunks of one prompt, both in flight
    for output in outputs:
        scheduler.update(output, engine.worker.execute(output))
    lines = scheduler.trace
    assert [(line["total"], list(line["sampled"]), line["finished"]) for line in lines] == [
        (32, [], {}),
        (28, ["a"], {}),
    ]
    output = scheduler.schedule()
    scheduler.retract(output)
    assert lines[-1]["failed"] and lines[-1]["sampled"] == {} and lines[-1]["free_after_update"] == 39
    engine.run()
    assert [line["step"] for line in lines] == list(range(len(lines))) and lines[-2]["finished"] == {
        "a": "FINISHED_LENGTH_CAPPED"
    }
    assert scheduler.end()["requests"]["a"]["num_preemptions"] == 1
