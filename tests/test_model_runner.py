"""The runner with a persistent batch, against the one that rebuilds it and against the tokens of each request alone.

Its model has no weights: a next token depends on the whole context, and the context is read through slots and tables.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedvllm.attention.paged import PagedMetadata, pad_tables, paged_slots
from pagedvllm.attention.torch_paged import TorchPagedAttention
from pagedvllm.batch import Span, build_batch
from pagedvllm.config import ModelConfig, SchedulerConfig
from pagedvllm.engine.simple_runner import SimpleRunner
from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.forward_context import ForwardContext
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.prefix_cache import PrefixCachingManager
from pagedvllm.model.loader import load_model
from pagedvllm.ops import TorchOps
from pagedvllm.request import Request, RequestStatus
from pagedvllm.sample.min_tokens import MinTokens
from pagedvllm.sample.sampler import Sampler, SamplingBatch
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from pagedvllm.sched.scheduler import Scheduler
from pagedvllm.worker.input_batch import BlockTables, InputBatch, RequestState
from pagedvllm.worker.model_runner import ModelRunner
from tests.conftest import save_checkpoint

CPU = torch.device("cpu")
VOCAB, EOS, LONGEST = 23, (3,), 24


def logits_after(context: list[int]) -> torch.Tensor:
    """[VOCAB]: what this file's model says after `context`."""
    state = 7
    for token in context:
        state = (state * 31 + token + 1) % 9973
    return 3 * torch.sin(state * torch.arange(1.0, VOCAB + 1))


class HashModel:
    """Keeps (position, token) in each slot and believes only what it finds there."""

    def __init__(self, block_size: int) -> None:
        self.build, self.block_size = SimpleNamespace(device=CPU), block_size
        self.cells: dict[int, tuple[int, int]] = {}
        self.inputs: tuple[Any, ...] = ()
        self.rows_of_logits = 0  # of the last step

    def __call__(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        meta = ctx.metadata
        assert isinstance(meta, PagedMetadata)
        self.rows_of_logits, tables = 0, meta.block_tables.tolist()
        tokens, positions, slots = token_ids.tolist(), ctx.positions.tolist(), meta.slot_mapping.tolist()
        self.inputs = tokens, positions, slots, meta.query_start_loc, meta.seq_lens, tables
        for slot, position, token in zip(slots, positions, tokens, strict=True):
            assert slot >= self.block_size, "a write to the null block"
            self.cells[slot] = position, token
        out = []
        for table, length, start, stop in zip(
            tables, meta.seq_lens, meta.query_start_loc[:-1], meta.query_start_loc[1:], strict=True
        ):
            found = [self.cells[slot] for slot in paged_slots(table, self.block_size, 0, length)]
            assert [position for position, _ in found] == list(range(length))
            context = [token for _, token in found]
            out += [logits_after(context[: length - n]) for n in reversed(range(stop - start))]
        return torch.stack(out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows_of_logits += len(hidden)
        return hidden.clone()


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    """The output of a request that has the model for itself and never fails."""
    request = Request("alone", prompt, params, eos_token_ids=EOS)
    generator = torch.Generator().manual_seed(params.seed or 0)
    sampler, reason = Sampler([MinTokens()]), None
    while reason is None:
        batch = SamplingBatch([params], [generator], [request.token_ids], [len(prompt)], [EOS])
        token = sampler(logits_after(request.token_ids).unsqueeze(0), batch)[0]
        reason = request.append(token, LONGEST)
    return request.output_token_ids


class Sabotage(Exception):
    pass


def break_after(owner: Any, name: str, calls: int) -> Callable[[], None]:
    """Let a method raise after it has done its work for the `calls`th time. Returns what mends it."""
    method, left = getattr(owner, name), [calls]

    def broken(*arguments: Any) -> Any:
        result = method(*arguments)
        left[0] -= 1
        if left[0] == 0:
            raise Sabotage(name)
        return result

    setattr(owner, name, broken)
    return lambda: setattr(owner, name, method)


# ---------------------------------------------------------------- any life, against the simple runner


PARAMS = st.builds(
    lambda seed, **kwargs: SamplingParams(
        temperature=0.0 if seed is None else 0.9, seed=seed, stop_token_ids=[4], **kwargs
    ),
    seed=st.sampled_from([None, None, 0, 1]),
    max_tokens=st.integers(1, 12),
    min_tokens=st.sampled_from([0, 0, 1]),
    ignore_eos=st.booleans(),
)
PROMPTS = st.sampled_from([[1] * 3, [1] * 8, [1, 2] * 6, list(range(9)), list(range(17)), [5], [1] * 30])
ARRIVALS = st.tuples(st.sampled_from("abcdefgh"), PROMPTS, PARAMS, st.integers(0, 2))


class Life(RuleBasedStateMachine):
    """Arrive, under ids that are used again; step; abort; be preempted; fail at any point of a step."""

    @initialize(
        num_blocks=st.integers(7, 20),
        block_size=st.sampled_from([1, 3, 4]),
        kind=st.sampled_from([PrefixCachingManager, KVCacheManager]),
        policy=st.sampled_from(["fcfs", "priority"]),
        seqs=st.integers(2, 5),
        budget=st.integers(5, 20),
        threshold=st.sampled_from([0, 0, 3]),
        mirrored=st.booleans(),
    )
    def start(
        self, num_blocks: int, block_size: int, kind: Any, policy: str, seqs: int, budget: int, threshold: int,
        mirrored: bool,
    ) -> None:  # fmt: skip
        config = SchedulerConfig(seqs, budget, policy, long_prefill_token_threshold=threshold)
        self.scheduler = Scheduler(config, kind(num_blocks, block_size), LONGEST)
        limits = BatchLimits(seqs, budget, LONGEST, block_size)
        self.model, other = HashModel(block_size), HashModel(block_size)
        nothing = cast("Any", None)
        self.runner = ModelRunner(cast("Any", self.model), nothing, TorchOps(), limits, 0)
        self.simple = SimpleRunner(cast("Any", other), nothing, TorchOps(), limits, 0)
        if mirrored:  # as on a GPU: the device's tables are a copy
            tables = self.runner.batch.tables
            tables.mirrored, tables.on_device = True, tables.on_device.clone()
        self.seen: list[Request] = []

    @rule(arrivals=st.lists(ARRIVALS, min_size=3, max_size=6))
    def arrive(self, arrivals: list[tuple[str, list[int], SamplingParams, int]]) -> None:
        for name, prompt, params, priority in arrivals:
            if name not in self.scheduler.requests:
                request = Request(name, prompt, params, float(len(self.seen)), priority, EOS)
                self.seen.append(request)
                self.scheduler.add_request(request)

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        output = self.scheduler.schedule()
        got = self.runner.execute(output)
        assert got == self.simple.execute(output)
        if output.num_scheduled_tokens:
            self.check_inputs(output)
        self.check_rows(output, got)
        self.scheduler.update(output, got)

    @precondition(lambda self: self.scheduler.requests)
    @rule(
        where=st.sampled_from(["remove", "add", "tables", "model", "logits", "sampler", "tokens"]),
        calls=st.integers(1, 3),
    )
    def fail(self, where: str, calls: int) -> None:
        """Whatever was done by then is as good as not done. What was written to the cache may be anything."""
        output = self.scheduler.schedule()
        runner, model = self.runner, self.model
        mend = {
            "remove": lambda: break_after(runner.batch, "remove", calls),
            "add": lambda: break_after(runner.batch, "add", calls),
            "tables": lambda: break_after(runner.batch.tables, "append", calls),
            "model": lambda: break_after(runner, "model", 1),
            "logits": lambda: break_after(model, "logits", 1),
            "sampler": lambda: break_after(runner, "sampler", 1),
            "tokens": lambda: break_after(runner.batch, "append_tokens", 1),
        }[where]()
        try:
            result = runner.execute(output)
        except Sabotage:
            for name, num_tokens in output.num_scheduled_tokens.items():
                start = output.num_computed_tokens[name]
                table = self.scheduler.kv.block_ids(name)
                for slot in paged_slots(table, self.scheduler.kv.block_size, start, start + num_tokens):
                    model.cells.pop(slot, None)
            self.scheduler.retract(output)
        else:  # the step did not come by there
            assert result == self.simple.execute(output)
            self.scheduler.update(output, result)
        finally:
            mend()

    @precondition(lambda self: len(self.scheduler.requests) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish_requests([data.draw(st.sampled_from(sorted(self.scheduler.requests)))])

    def check_inputs(self, output: SchedulerOutput) -> None:
        """What the model was given is what the plain functions of chapters 2 and 4 make of it, in the order of rows."""
        kv, requests = self.scheduler.kv, self.scheduler.requests
        names = [row.request_id for row in self.runner.batch.rows if row.request_id in output.num_scheduled_tokens]
        spans = []
        for name in names:
            start = output.num_computed_tokens[name]
            spans.append(Span(requests[name], start, start + output.num_scheduled_tokens[name]))
        tables = {name: kv.block_ids(name) for name in names}
        batch = build_batch(
            spans, lambda span: paged_slots(tables[span.request.request_id], kv.block_size, span.start, span.end)
        )
        padded = pad_tables(list(tables.values()), CPU).tolist()
        want = batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start_loc, batch.seq_lens, padded
        assert self.model.inputs == want
        assert self.model.rows_of_logits == len(batch.sample_rows)

    def check_rows(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Each running request has one row, with its tokens and its blocks; all else in the tables is 0."""
        batch, sampled = self.runner.batch, dict(zip(result.req_ids, result.sampled, strict=True))
        names = [row.request_id for row in batch.rows]
        assert batch.row_of == {name: row for row, name in enumerate(names)}
        assert set(names) == {request.request_id for request in self.scheduler.running}
        histories = batch.histories(np.arange(len(names)))
        for name, history in zip(names, histories, strict=True):
            tokens = self.scheduler.requests[name].token_ids + sampled.get(name, [])
            assert list(history) == tokens
        tables = batch.tables.host.tolist()
        for row, table in enumerate(tables):
            own = self.scheduler.kv.block_ids(names[row]) if row < len(names) else []
            assert table == own + [0] * (len(table) - len(own))
        if output.num_scheduled_tokens:
            assert batch.tables.on_device.tolist() == tables
        assert self.runner.seeded.keys() <= self.scheduler.requests.keys()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_requests():
            self.step()
        assert not self.runner.batch.rows and not self.runner.seeded
        for request in self.seen:
            want = alone(request.token_ids[: request.num_prompt_tokens], request.params)
            if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                want = want[: request.num_output_tokens]
            assert request.output_token_ids == want


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


# ---------------------------------------------------------------- what no scheduler of ours does, but one may


def runner(limits: BatchLimits, seed: int = 0) -> tuple[ModelRunner, HashModel]:
    model = HashModel(limits.block_size)
    return ModelRunner(cast("Any", model), cast("Any", None), TorchOps(), limits, seed), model


class Driver:
    """Makes SchedulerOutputs by hand, from a pool that never runs dry."""

    def __init__(self, limits: BatchLimits, seed: int = 0) -> None:
        self.runner, self.model = runner(limits, seed)
        self.limits, self.requests, self.tables = limits, dict[str, Request](), dict[str, list[int]]()
        self.steps, self.next_block, self.finished = 0, 1, list[str]()

    def add(self, name: str, prompt: list[int], **params: Any) -> Request:
        params = {"temperature": 0.0, "max_tokens": 99, "ignore_eos": True} | params
        request = self.requests[name] = Request(name, prompt, SamplingParams(**params), eos_token_ids=EOS)
        return request

    def output(self, plan: dict[str, int], preempted: list[str] = []) -> SchedulerOutput:  # noqa: B006
        """Who computes how many tokens; 0: all that are left."""
        self.steps += 1
        output = SchedulerOutput(self.steps, preempted_req_ids=preempted, finished_req_ids=self.finished)
        self.finished = []
        for name in preempted:
            self.requests[name].num_computed_tokens = 0
            del self.tables[name]
        for name, num_tokens in plan.items():
            request, start = self.requests[name], self.requests[name].num_computed_tokens
            if name not in self.tables:
                output.scheduled_new_reqs.append(NewRequestData.of(request))
            table = self.tables.setdefault(name, [])
            num_tokens = min(num_tokens or request.num_tokens, request.num_tokens - start)
            missing = -(-(start + num_tokens) // self.limits.block_size) - len(table)
            blocks = list(range(self.next_block, self.next_block + missing))
            self.next_block += len(blocks)
            table += blocks
            output.add(name, start, num_tokens, blocks)
        return output

    def step(self, plan: dict[str, int], preempted: list[str] = []) -> dict[str, list[int]]:  # noqa: B006
        output = self.output(plan, preempted)
        result = self.runner.execute(output)
        assert result.req_ids == list(plan)
        for name, tokens in zip(result.req_ids, result.sampled, strict=True):
            request = self.requests[name]
            request.num_computed_tokens += output.num_scheduled_tokens[name]
            assert len(tokens) == (request.num_computed_tokens == request.num_tokens)
            if tokens and request.append(tokens[0], LONGEST):
                self.finish(name)
        return dict(zip(result.req_ids, result.sampled, strict=True))

    def finish(self, name: str) -> None:
        del self.requests[name]
        self.tables.pop(name, None)
        self.finished.append(name)


@pytest.mark.parametrize("seed", range(8))
def test_any_subset_of_the_rows_in_any_order(seed: int) -> None:
    r = random.Random(seed)
    driver = Driver(BatchLimits(6, 40, LONGEST, r.choice([1, 4, 16])))
    done = 0
    for _ in range(120):
        while len(driver.requests) < 6:
            sampled = {"temperature": 0.9, "seed": r.randrange(9)} if r.random() < 0.4 else {}
            prompt = [r.randrange(VOCAB) for _ in range(r.randrange(1, 15))]
            free = [name for name in "abcdefgh" if name not in driver.requests]
            driver.add(r.choice(free), prompt, max_tokens=r.randrange(1, 14), **sampled)
        names = r.sample(sorted(driver.requests), r.randrange(0, 6))
        out = [n for n in driver.tables if n not in names and r.random() < 0.1]
        living = dict(driver.requests)
        driver.step({name: r.choice([0, 1, 2, 5]) for name in names}, out)
        for name in living.keys() - driver.requests.keys():
            done += 1
            request = living[name]
            assert request.output_token_ids == alone(request.token_ids[: request.num_prompt_tokens], request.params)
    assert done > 20


def test_a_step_without_tokens_only_says_who_has_finished() -> None:
    driver = Driver(BatchLimits(2, 8, LONGEST, 4))
    driver.add("a", [1, 2], temperature=1.0, seed=3)
    driver.step({"a": 0})
    driver.finish("a")
    driver.finished.append("unknown")
    assert driver.runner.seeded and driver.runner.batch.rows
    assert driver.runner.execute(driver.output({})) == ModelRunnerOutput([], [])
    assert not driver.runner.seeded and not driver.runner.batch.rows


def test_requests_without_a_seed_share_a_stream_and_the_others_are_not_disturbed() -> None:
    def run(seed: int, neighbours: int = 3) -> list[dict[str, list[int]]]:
        driver = Driver(BatchLimits(8, 64, LONGEST, 4), seed)
        for i in range(neighbours):
            driver.add(f"free{i}", [5, i], temperature=1.5)
        driver.add("own", [7, 7], temperature=1.5, seed=11)
        return [driver.step(dict.fromkeys(driver.requests, 0)) for _ in range(12)]

    assert run(0) == run(0) and run(0) != run(1)
    own = [step["own"][0] for step in run(0)]
    assert own == [step["own"][0] for step in run(1, neighbours=1)]
    assert own == alone([7, 7], SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True))


def test_what_a_failed_step_drew_is_drawn_again() -> None:
    def run(fail: bool) -> list[dict[str, list[int]]]:
        driver = Driver(BatchLimits(8, 64, LONGEST, 4))
        for i in range(3):
            driver.add(f"r{i}", [5, i], temperature=1.5, seed=[None, None, 2][i])
        steps = []
        for i in range(6):
            names = list(driver.requests)
            if fail and i == 3:
                mend = break_after(driver.runner, "sampler", 1)
                with pytest.raises(Sabotage):
                    driver.runner.execute(driver.output(dict.fromkeys(names, 0)))
                mend()
                assert not driver.runner.batch.rows
                driver.tables, driver.steps = {}, driver.steps + 1
                for request in driver.requests.values():
                    request.num_computed_tokens = 0
            steps.append(driver.step(dict.fromkeys(names, 0)))
        return steps

    assert run(fail=True) == run(fail=False)


def test_a_step_that_fails_early_keeps_nobody_whom_it_preempts() -> None:
    driver = Driver(BatchLimits(3, 64, LONGEST, 4))
    for name in "abc":
        driver.add(name, [1, 2, 3])
    driver.step({"a": 0, "b": 0, "c": 0})
    driver.finish("c")
    break_after(driver.runner.batch, "remove", 1)
    with pytest.raises(Sabotage):
        driver.runner.execute(driver.output({"a": 0}, preempted=["b"]))
    assert not driver.runner.batch.rows


def test_a_request_that_is_sent_again_replaces_what_was() -> None:
    """A step whose result was lost on the way, after the runner had done its part."""
    driver = Driver(BatchLimits(2, 64, LONGEST, 4))
    living = [driver.add("a", [1, 2, 3], max_tokens=9), driver.add("b", [4, 5], max_tokens=9)]
    driver.step({"a": 0, "b": 0})
    driver.runner.execute(driver.output({"a": 0, "b": 0}))
    driver.tables = {}
    for request in living:
        request.num_computed_tokens = 0
    while driver.requests:
        driver.step(dict.fromkeys(driver.requests, 0))
    for request in living:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == alone(prompt, request.params)


# ---------------------------------------------------------------- by difference


class Counting(np.ndarray[Any, Any]):
    """Counts the numbers that are written to it."""

    written = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        Counting.written += int(np.size(self[key]))
        super().__setitem__(key, value)


def test_a_step_writes_what_is_new_and_nothing_else() -> None:
    """100 rows of 15 to 114 tokens: a decode step writes 100 tokens and the blocks that begin with one of them."""
    limits = BatchLimits(128, 8192, 256, 16)
    driver = Driver(limits)
    for i in range(100):
        driver.add(f"r{i}", [i % VOCAB] * (15 + i))
    batch = driver.runner.batch
    for owner, name in [(batch, "token_ids"), (batch, "num_tokens"), (batch.tables, "host"), (batch.tables, "lengths")]:
        setattr(owner, name, getattr(owner, name).view(Counting))
    addresses = [batch.token_ids.ctypes.data, batch.tables.host.ctypes.data, batch.tables.on_device.data_ptr()]
    names, outputs = list(driver.requests), []
    for _ in range(5):
        output = driver.output(dict.fromkeys(names, 0))
        Counting.written = 0
        result = driver.runner.execute(output)
        outputs.append((Counting.written, sum(map(len, output.new_block_ids.values()))))
        for name, tokens in zip(names, result.sampled, strict=True):
            request = driver.requests[name]
            request.num_computed_tokens = request.num_tokens
            request.append(tokens[0], 256)
    prompts = sum(15 + i for i in range(100))
    assert outputs[0][0] == prompts + 100 + outputs[0][1] + 100 + 200  # tokens, lengths; blocks, lengths; one more each
    for written, new_blocks in outputs[1:]:
        assert 0 < new_blocks < 10
        assert written == 200 + 2 * new_blocks  # a token and a length each; a block and a length for each new block
    driver.finish("r0")
    Counting.written = 0
    driver.runner.execute(driver.output({}))
    assert 0 < Counting.written < 2 * (120 + 8 + 8)  # the last row moves into the hole
    assert [batch.token_ids.ctypes.data, batch.tables.host.ctypes.data, batch.tables.on_device.data_ptr()] == addresses


def test_only_the_changed_part_of_the_tables_is_sent() -> None:
    tables = BlockTables(4, 8, CPU)
    tables.mirrored, tables.on_device = True, tables.on_device.clone()
    tables.append(0, [1, 2])
    tables.append(2, [3, 4, 5])
    assert tables.on_device.sum() == 0
    tables.send()
    assert tables.on_device.tolist() == tables.host.tolist()
    tables.on_device[0] = -1  # so that it shows if it is sent again
    tables.move(2, 1)
    tables.append(1, [6])
    tables.send()
    assert tables.on_device.tolist() == [[-1] * 8, [3, 4, 5, 6, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert tables.of(np.array([1])).tolist() == [[3, 4, 5, 6]]  # not the first rows: gathered
    view = tables.of(np.array([0, 1]))
    assert view.data_ptr() == tables.on_device.data_ptr() and view.shape == (2, 4)


def test_memory_is_mapped_where_it_is_written() -> None:
    """A table of tokens for 1024 requests of 131072 tokens is half a GiB, of which a short request needs a page."""
    status = Path("/proc/self/status")

    def resident() -> int:
        """kB; nothing to be seen where there is no /proc."""
        lines = status.read_text().splitlines() if status.exists() else ["VmRSS: 0 kB"]
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident()
    batch = InputBatch(BatchLimits(1024, 8192, 131072, 16), CPU)
    assert batch.token_ids.nbytes == 2**29 and batch.tables.host.nbytes == 2**26
    batch.add(RequestState("a", SamplingParams(), 3, EOS, torch.Generator()), [1, 2, 3])
    assert resident() - before < 2**15  # 32 MiB


def test_limits_are_named() -> None:
    driver = Driver(BatchLimits(2, 8, LONGEST, 4))
    for name in "abc":
        driver.add(name, [1, 2, 3])
    with pytest.raises(ValueError, match="more requests run than max_num_seqs, 2"):
        driver.step({"a": 0, "b": 0, "c": 0})
    with pytest.raises(ValueError, match="request 'long': 25 tokens are more than max_model_len, 24"):
        driver.add("long", [1] * 25)
        driver.step({"long": 2})
    with pytest.raises(ValueError, match="9 tokens are more than max_num_batched_tokens, 8"):
        driver.add("wide", [1] * 9)
        driver.step({"wide": 9})
    with pytest.raises(ValueError, match="max_model_len allows tables of 6 blocks, not of 7"):
        driver.runner.batch.tables.append(0, list(range(7)))
    assert not driver.runner.batch.rows  # each failed step gave up its rows


# ---------------------------------------------------------------- a real model


@pytest.mark.parametrize("variant", ["qwen3", "llama-tied"])
def test_a_small_model_in_a_pool_that_preempts(tmp_path: Path, variant: str) -> None:
    """Half of the memory is garbage to begin with; requests share beginnings; every seventh step fails."""
    save_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, ModelConfig(dtype="float32", device="cpu"), CPU)
    r = random.Random(5)
    common = [r.randrange(3, 100) for _ in range(20)]
    prompts = [
        common[: r.choice([0, 9, 20])] + [r.randrange(3, 100) for _ in range(r.randrange(1, 30))] for _ in range(20)
    ]

    def run(kind: Any, num_blocks: int, failing: bool) -> tuple[list[list[int]], int]:
        limits = BatchLimits(6, 24, 128, 4)
        backend = TorchPagedAttention(model.attention_specs(), num_blocks, 4, torch.float32, CPU)
        for cache in backend.caches:
            for tensor in cache:
                tensor.fill_(float("nan"))
        scheduler = Scheduler(SchedulerConfig(6, 24), PrefixCachingManager(num_blocks, 4), 128)
        made = kind(model, backend, TorchOps(), limits, 0)
        requests = []
        for i, prompt in enumerate(prompts):
            sampled = {"temperature": 0.8, "seed": i} if i % 4 == 1 else {"temperature": 0.0}
            params = SamplingParams(max_tokens=r.randrange(1, 25), ignore_eos=True, **cast("Any", sampled))
            requests.append(Request(str(i), prompt, params, float(i)))
            scheduler.add_request(requests[-1])
        while scheduler.has_requests():
            output = scheduler.schedule()
            if failing and output.step % 7 == 0 and output.num_scheduled_tokens:
                mend = break_after(made, "sampler", 1)
                try:
                    scheduler.update(output, made.execute(output))
                except Sabotage:
                    scheduler.retract(output)
                mend()
            else:
                scheduler.update(output, made.execute(output))
        return [request.output_token_ids for request in requests], sum(q.num_preemptions for q in requests)

    state = r.getstate()
    want, _ = run(SimpleRunner, 600, failing=False)
    r.setstate(state)
    got, preemptions = run(ModelRunner, 30, failing=True)
    assert got == want and preemptions > 10 and len({tuple(tokens) for tokens in got}) > 10
