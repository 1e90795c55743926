"""Lab 5: the life of a request as three layers see it, a metric from end to end, a stop-string matcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.engine.messages import EngineCoreRequest, SchedulerStats
from pagedvllm.llm import LLM
from pagedvllm.request import RequestStatus
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.scheduler import Scheduler
from pagedvllm.teach.labs import Case, Task
from pagedvllm.teach.scripted import ScriptedExecutor

SCRIPTED = f"{ScriptedExecutor.__module__}:{ScriptedExecutor.__qualname__}"

# ---------------------------------------------------------------- 5.1 the life of a request

PIECES = ["Once", " EN", "V", " and", " E", "ND", " more"]  # what the model says to B, a token each
STATES = [status.name for status in RequestStatus]


class Moment(NamedTuple):
    """How B stands after a step: in the scheduler, in memory, and for its caller."""

    state: str
    blocks: int
    text: str


@cache
def life() -> list[Moment]:
    """What the engine does with B, step by step."""
    llm = LLM(
        block_size=4, num_gpu_blocks_override=5, enable_prefix_caching=False, distributed_executor_backend=SCRIPTED
    )
    engine: Any = llm.engine
    words = [llm.tokenizer.encode(piece) for piece in PIECES]
    assert all(len(word) == 1 for word in words)
    engine.core.executor.script = {"B": [token for word in words for token in word]}
    engine.add_request("A", None, [9] * 6, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add_request("B", None, [8] * 3, SamplingParams(max_tokens=20, stop="END"))
    request, text, moments = engine.core.scheduler.requests["B"], "", list[Moment]()
    while not request.finished:
        for output in engine.step():
            if output.request_id == "B":
                text = output.outputs[0].text
        held = len(engine.core.scheduler.kv.block_ids("B"))
        moments.append(Moment(request.status.name, held, text))
    return moments


def parse(drawing: str) -> dict[int, Moment]:
    """The lines of a drawing (`1 | RUNNING | 1 | "On"`): step -> what they say.

    Raises:
        ValueError: a line is of another form, or draws a step again.
    """
    rows: dict[int, Moment] = {}
    for line in filter(None, map(str.strip, drawing.splitlines())):
        step, *parts = (part.strip() for part in line.split("|"))
        text = parts[2] if len(parts) == 3 else ""
        if not (step.isdigit() and len(parts) == 3 and parts[1].isdigit() and text[:1] == text[-1:] == '"' != text):
            raise ValueError(f'{line!r} is not of the form 1 | RUNNING | 1 | "On"')
        if int(step) in rows:
            raise ValueError(f"step {step} is drawn twice")
        rows[int(step)] = Moment(parts[0], int(parts[1]), text[1:-1])
    return rows


def _drawn(wrong: Callable[[dict[int, Moment]], str]) -> Callable[[Any], str]:
    """A check of a drawing, from what is wrong with its lines."""

    def check(got: Any) -> str:
        if not isinstance(got, str):
            return f"the drawing must be text, got {type(got).__name__}"
        try:
            return wrong(parse(got))
        except ValueError as error:
            return str(error)

    return check


def _wrong_step(step: int, rows: dict[int, Moment]) -> str:
    if step not in rows:
        return f"step {step} is not in the drawing"
    row, right = rows[step], life()[step - 1]
    if row.state not in STATES:
        return f"step {step}: {row.state!r} is no state; there are {', '.join(STATES)}"
    wrong = [name for name, a, b in zip(Moment._fields, row, right, strict=True) if a != b]
    return f"step {step}: look again at the {' and the '.join(wrong)}" if wrong else ""


def _other_steps(rows: dict[int, Moment]) -> str:
    other = sorted(rows.keys() - range(1, len(life()) + 1))
    return f"step {other[0]} is none of B's" if other else ""


LIFE_CASES = [
    *(Case(check=_drawn(partial(_wrong_step, step)), note=f"step {step}") for step in range(1, 9)),
    Case(check=_drawn(_other_steps), note="no other step"),
]

# ---------------------------------------------------------------- 5.2 a metric from end to end


@dataclass(frozen=True)
class MoreStats(SchedulerStats):
    """What the task adds: a counter since the start, and a gauge of this moment."""

    num_preempted_reqs: int = 0
    num_waiting_tokens: int = 0


class Arrival(NamedTuple):
    """A request of `prompt` tokens that wants `output` more; it arrives before step `at`, is aborted before `gone`."""

    name: str
    prompt: int
    output: int
    at: int = 1
    gone: int = 0


class Situation(NamedTuple):
    """Requests, and an engine that is too small for them."""

    arrivals: tuple[Arrival, ...]
    blocks: int
    seats: int = 8

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "block_size": 4,
            "num_gpu_blocks_override": self.blocks + 1,
            "max_num_seqs": self.seats,
            "enable_prefix_caching": False,
            "distributed_executor_backend": SCRIPTED,
        }


def stats_of(scheduler: type[Scheduler], core: type[EngineCore], situation: Situation) -> list[tuple[int, int]]:
    """Run an engine core of these classes. After each step: (num_preempted_reqs, num_waiting_tokens) of its stats."""
    engine = _make(scheduler, core, situation)
    seen = []
    for _ in _drive(engine, situation):
        stats: Any = engine.last.scheduler_stats
        seen.append((stats.num_preempted_reqs, stats.num_waiting_tokens))
    return seen


class AnswerScheduler(Scheduler):
    """Stands for the scheduler of an answer, which the engine finds by name."""


def _make(scheduler: type[Scheduler], core: type[EngineCore], situation: Situation) -> Any:
    name = f"{__name__}:AnswerScheduler"
    globals()["AnswerScheduler"] = scheduler
    try:
        return core(EngineConfig.create(**situation.settings, scheduler_cls=name))
    finally:
        globals()["AnswerScheduler"] = AnswerScheduler


def _drive(core: Any, situation: Situation) -> Any:
    """One step at a time; `core.last` is what the step gave."""
    step = 0
    while step == 0 or core.scheduler.requests or any(a.at > step for a in situation.arrivals):
        step += 1
        for arrival in situation.arrivals:
            if arrival.at == step:
                params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
                core.add_request(EngineCoreRequest(arrival.name, [1] * arrival.prompt, params, (), float(step)))
            if arrival.gone == step:
                core.abort_requests([arrival.name])
        core.last = core.step()
        yield step


def recorded(situation: Situation) -> list[tuple[int, int]]:
    """What is right, from the trace of the recording scheduler and a look into its queue after each step."""
    core: Any = EngineCore(EngineConfig.create(**situation.settings, scheduler_cls="recording"))
    right, preempted = [], 0
    for step in _drive(core, situation):
        preempted += len(core.scheduler.trace[step - 1]["preempted"])
        right.append((preempted, sum(request.num_tokens for request in core.scheduler.waiting)))
    return right


def _check_stats(got: Any, situation: Situation) -> str:
    right = recorded(situation)
    if not isinstance(got, list) or len(got) != len(right):
        return f"expected stats of {len(right)} steps, got {got!r}"
    for step, (mine, theirs) in enumerate(zip(got, right, strict=True), 1):
        for name, a, b in zip(("num_preempted_reqs", "num_waiting_tokens"), mine, theirs, strict=True):
            if a != b:
                return f"after step {step} {name} should be {b}, and is {a}"
    return ""


def _stats_case(note: str, arrivals: Sequence[tuple[Any, ...]], blocks: int, seats: int = 8) -> Case:
    situation = Situation(tuple(Arrival(*arrival) for arrival in arrivals), blocks, seats)
    return Case((situation,), note=note, check=_check_stats)


METRIC_CASES = [
    _stats_case("room for all", [("A", 5, 3), ("B", 6, 4)], 20),
    _stats_case("one seat: the others wait", [("A", 5, 3), ("B", 6, 2), ("C", 3, 2, 2)], 20, seats=1),
    _stats_case("who is preempted waits with all its tokens", [("A", 6, 5), ("B", 3, 6)], 4),
    _stats_case("a counter never falls, also when who was preempted has ended",
                [("A", 6, 5), ("B", 3, 6), ("C", 4, 9, 9)], 4),
    _stats_case("two lose their blocks in one step", [("A", 4, 4), ("B", 4, 4), ("C", 3, 4), ("D", 3, 4)], 4),
    _stats_case("little room for long, and one who gives up",
                [("A", 6, 12), ("B", 3, 9), ("C", 3, 9), ("D", 9, 2, 3, 5)], 6),
]  # fmt: skip

# ---------------------------------------------------------------- 5.3 a stop-string matcher


class LeastHeldBack:
    """What is right, character by character: out comes all that can no longer be part of a stop string."""

    def __init__(self, stop: list[str]) -> None:
        self.stop, self.held, self.met = stop, "", None  # type: list[str], str, str | None

    def add(self, piece: str) -> str:
        shown = ""
        for character in piece if self.met is None else "":
            self.held += character
            ends = [stop for stop in self.stop if self.held.endswith(stop)]
            if ends:
                self.met = ends[0]
                shown += self.held.removesuffix(self.met)
                self.held = ""
                break
            longest = max(map(len, self.stop)) - 1
            keep = next(n for n in range(min(longest, len(self.held)), -1, -1) if self._may_begin(n))
            shown, self.held = shown + self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def _may_begin(self, count: int) -> bool:
        end = self.held[len(self.held) - count :]
        return any(stop.startswith(end) for stop in self.stop)

    def finish(self) -> str:
        rest, self.held = self.held, ""
        return rest


def run_matcher(matcher: type[Any], stop: list[str], pieces: list[str]) -> list[Any]:
    """What comes out after each piece and at the end, and which stop string was met."""
    text = matcher(stop)
    return [*(text.add(piece) for piece in pieces), text.finish(), text.met]


def _random_case(seed: int) -> Case:
    rng = random.Random(seed)
    stop = ["".join(rng.choices("ab.", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
    pieces = ["".join(rng.choices("ab. ", k=rng.randrange(0, 5))) for _ in range(8)]
    return _matcher_case(f"random, seed {seed}", list(dict.fromkeys(stop)), pieces)


def _matcher_case(note: str, stop: list[str], pieces: list[str]) -> Case:
    return Case((stop, pieces), run_matcher(LeastHeldBack, stop, pieces), note)


MATCHER_CASES = [
    _matcher_case("in one piece", ["END"], ["The END of it"]),
    _matcher_case("in two pieces", ["END"], ["The E", "ND of it"]),
    _matcher_case("in three pieces", ["END"], ["The E", "N", "D no"]),
    _matcher_case("nothing is held back that cannot be part of one", ["END"], ["The ", "EN", "TER"]),
    _matcher_case("what looks like a beginning comes out at the end", ["END"], ["all E", "N"]),
    _matcher_case("a string that overlaps itself", ["aab"], ["aa", "a", "b"]),
    _matcher_case("the one that is complete first, whatever its place in the list", ["END.", "ND"], ["The EN", "D. x"]),
    _matcher_case("the first of the list, if two are complete at once", ["ND", "END"], ["The EN", "D x"]),
    _matcher_case("nothing comes after it", ["."], ["One. Two", " three", ""]),
    *(_random_case(seed) for seed in range(40)),
]

# ---------------------------------------------------------------- the lab

TASKS = {
    "5.1": Task("The life of a request, as three layers see it", LIFE_CASES),
    "5.2": Task("A metric from end to end", METRIC_CASES),
    "5.3": Task("Stop strings, with as little held back as possible", MATCHER_CASES),
}
