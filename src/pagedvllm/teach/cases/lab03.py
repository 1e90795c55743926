"""Lab 3: a policy that ages, one step's decisions, the lives of five requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.policy import FCFSQueue
from pagedvllm.sched.recorder import RecordingScheduler
from pagedvllm.teach.drive import Line, fake_model, make_request, make_scheduler, play
from pagedvllm.teach.labs import Case, Task
from pagedvllm.teach.schedule_figures import WORDS, Decision, decisions

# ---------------------------------------------------------------- 3.1 a policy

PATIENCE = 20  # steps of waiting that are worth one level of priority


class Arrival(NamedTuple):
    """A request of a case: prompt and output in tokens; it arrives before step `at`."""

    name: str
    prompt: int
    output: int
    at: int = 0
    priority: int = 0


def serve(queue: type[Any], arrivals: Sequence[Arrival], seats: int = 1, blocks: int = 100) -> list[str]:
    """Run a scheduler with the queue. What happened, in order: "A starts", "B is preempted", "B resumes"."""
    scheduler = make_scheduler(blocks, block_size=4, max_num_seqs=seats)
    scheduler.waiting = queue()
    trace = play(scheduler, [make_request(*arrival) for arrival in arrivals])
    scheduler.check_invariants()
    return [event for line in trace for event in _events(line)]


def _events(line: Line) -> list[str]:
    names = {"preempted": "is preempted", "resumed": "resumes", "new": "starts"}
    return [f"{name} {words}" for kind, words in names.items() for name in line.get(kind, ())]


class AgeingQueue(FCFSQueue):
    """The right answer, to compare with."""

    def peek(self) -> Request:
        return min(self, key=_ageing)

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        return request

    def victim(self, running: Sequence[Request]) -> int:
        keys = [_ageing(request) for request in running]
        return keys.index(max(keys))


def _ageing(request: Request) -> tuple[float, float]:
    return request.priority * PATIENCE + request.arrival_time, request.arrival_time


def _serve_case(note: str, arrivals: Sequence[tuple[Any, ...]], seats: int = 1, blocks: int = 100) -> Case:
    listed = [Arrival(*arrival) for arrival in arrivals]
    return Case((listed, seats, blocks), note=note, check=_check_events)


def _check_events(got: Any, arrivals: Sequence[Arrival], seats: int, blocks: int) -> str:
    expected = serve(AgeingQueue, arrivals, seats, blocks)
    if got == expected:
        return ""
    if not isinstance(got, list) or len(got) < len(expected):
        return f"expected {expected}, got {got!r}"
    first = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(expected))
    wanted = expected[first] if first < len(expected) else "the end"
    return f"event {first} should be {wanted!r}, and is {got[first]!r}"


def _queue_cases() -> list[Case]:
    stream = [(f"chat{i}", 8, 4, i) for i in range(60)]
    return [
        _serve_case("one level: in order of arrival", [("A", 8, 9), ("B", 8, 4, 1), ("C", 4, 4, 2)]),
        _serve_case("urgent goes first", [("A", 8, 9), ("B", 8, 4, 1, 1), ("C", 8, 4, 5, 0)]),
        _serve_case("not past one that waited 20 steps more", [("A", 8, 40), ("B", 8, 4, 1, 1), ("C", 8, 4, 25, 0)]),
        _serve_case("two levels are worth 40 steps", [("A", 8, 60), ("B", 8, 4, 1, 2), ("C", 8, 4, 39, 0)]),
        _serve_case("the victim is the last in this order, not the last in the list",
                    [("A", 8, 12), ("B", 8, 12, 0, 2), ("C", 8, 12, 1, 0)], 3, 8),
        _serve_case("who comes back keeps its place", [("A", 8, 12), ("B", 8, 12, 1), ("C", 8, 4, 2, 1)], 2, 7),
        _serve_case("a stream of chats starves nobody", [*stream[:5], ("document", 32, 4, 2, 1), *stream[5:]]),
    ]  # fmt: skip


# ---------------------------------------------------------------- 3.2 one step

BUDGET = 8


class Situation(NamedTuple):
    """Limits and requests of a run, and the step to draw."""

    arrivals: tuple[Arrival, ...]
    step: int
    blocks: int
    limits: dict[str, Any]


SITUATIONS = {
    "first": Situation((Arrival("A", 3, 9), Arrival("B", 12, 4, 1), Arrival("C", 6, 4, 1)), 1, 12, {}),
    "second": Situation((Arrival("A", 7, 9), Arrival("B", 4, 9), Arrival("C", 3, 4, 2)), 2, 4, {}),
    "third": Situation(
        (Arrival("A", 2, 12, 0, 2), Arrival("B", 2, 12, 1, 1), Arrival("C", 5, 12, 1, 0), Arrival("D", 9, 4, 3)),
        4, 5, {"policy": "priority"},
    ),
}  # fmt: skip


def _run(situation: Situation) -> RecordingScheduler:
    """The scheduler just before the step to draw, everybody who has arrived by then in its queue."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": BUDGET, **situation.limits}
    scheduler = make_scheduler(situation.blocks, block_size=4, **limits)
    for step in range(situation.step + 1):
        for arrival in situation.arrivals:
            if arrival.at == step:
                scheduler.add_request(make_request(*arrival))
        if step < situation.step:
            output = scheduler.schedule()
            scheduler.update(output, fake_model(scheduler, output))
    return scheduler


def describe(name: str) -> None:
    """Print how things stand before the step."""
    scheduler = _run(SITUATIONS[name])
    print(f"{name}: budget {BUDGET}, blocks of 4, {scheduler.kv.num_free_blocks} free, {scheduler.config.policy}")
    for word, requests in (("running", scheduler.running), ("waiting", list(scheduler.waiting))):
        for r in requests:
            held = len(scheduler.kv.block_ids(r.request_id))
            text = f"  {r.request_id} {word}: {r.num_computed_tokens} of {r.num_tokens} tokens computed, {held} blocks"
            print(text + (f", priority {r.priority}" if scheduler.config.policy == "priority" else ""))


def outcome(name: str) -> list[Decision]:
    """What the engine decides."""
    scheduler = _run(SITUATIONS[name])
    output = scheduler.schedule()
    scheduler.update(output, fake_model(scheduler, output))
    return decisions(scheduler.trace, SITUATIONS[name].step)


def _check_step(got: Any, name: str) -> str:
    if got is None or got is ...:
        return "not drawn yet"
    expected = {row.name: row for row in outcome(name)}
    try:
        rows = {row.name: row for row in (Decision(*row) for row in got)}
    except TypeError:
        return f'expected a list of (name, decision, tokens) such as ("A", "run", 1), got {got!r}'
    for row in rows.values():
        if row.kind not in WORDS:
            return f"{row.name}: the decision must be one of {', '.join(WORDS)}; got {row.kind!r}"
    if rows.keys() != expected.keys():
        return f"expected a decision for each of {', '.join(expected)}, got {', '.join(rows)}"
    wrong = [row.name for row in rows.values() if row != expected[row.name]]
    return f"look again at {', '.join(wrong)}" if wrong else ""


# ---------------------------------------------------------------- 3.3 lives


class Witness(Request):
    """A request that remembers through which states it has come."""

    life: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.life = [self.status.name]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "status":
            self.life.append(self.status.name)


STOP = 7  # the fake model's only token


def lives() -> dict[str, list[str]]:
    """The states of five requests, as the engine goes through them."""
    scheduler = make_scheduler(4, block_size=4, max_num_seqs=2, max_num_batched_tokens=BUDGET)
    lengths = {"A": (4, 9), "B": (4, 6), "C": (2, 3), "D": (20, 3), "E": (4, 20)}
    requests = []
    for name, (prompt, most) in lengths.items():
        params = SamplingParams(max_tokens=most, stop_token_ids=[STOP] if name == "E" else None)
        requests.append(Witness(name, [1] * prompt, params))
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_requests():
        if len(scheduler.trace) == 3:
            scheduler.finish_requests(["C"])
        output = scheduler.schedule()
        scheduler.update(output, fake_model(scheduler, output))
    return {request.request_id: request.life for request in requests}


def _check_life(got: Any, name: str) -> str:
    if got is None or got is ...:
        return "not drawn yet"
    expected = lives()[name]
    if not isinstance(got, (list, tuple)) or not all(isinstance(state, str) for state in got):
        return f"expected a list of names of states, got {got!r}"
    for i, (mine, right) in enumerate(zip(got, expected, strict=False)):
        if mine != right:
            return f"state {i} is not {mine}"
    if len(got) == len(expected):
        return ""
    return "it does not end there" if len(got) < len(expected) else f"it ends with {expected[-1]}"


def _named(check: Callable[[Any, str], str], names: Sequence[str]) -> list[Case]:
    return [Case((name,), note=name, check=check) for name in names]


TASKS = {
    "3.1": Task("A policy that ages", _queue_cases),
    "3.2": Task("One step's decisions", _named(_check_step, list(SITUATIONS))),
    "3.3": Task("Five lives", _named(_check_life, "ABCDE")),
}
