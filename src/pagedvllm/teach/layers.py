"""The engine's layers, watched from outside: who calls whom, with what, for how long; which states requests take.

Chapter 5 and its lab. Methods are replaced on the very objects of one engine, and put back; the engine knows nothing
of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedvllm.llm import LLM

LANES = ("front end", "core", "scheduler", "memory", "worker", "runner", "model")


@dataclass(eq=False)
class Call:
    """One call of a watched method. `start` and `stop` in seconds; `inside`: the watched calls that it made."""

    lane: str
    name: str  # "Scheduler.schedule"
    args: tuple[Any, ...]
    start: float
    stop: float = 0.0
    result: Any = None
    inside: list[Call] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    @property
    def own(self) -> float:
        """Seconds that it spent itself, not in watched calls that it made."""
        return self.seconds - sum(call.seconds for call in self.inside)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Call]]:
        """(depth, call) of this call and all below it, in the order in which they began."""
        yield depth, self
        for call in self.inside:
            yield from call.walk(depth + 1)


class Watch(list[Call]):
    """The outermost calls, in order."""

    def walk(self) -> Iterator[tuple[int, Call]]:
        for call in self:
            yield from call.walk()

    def find(self, name: str) -> list[Call]:
        """All calls of one method, `Class.method`. Raises ValueError if there is none."""
        found = [call for _, call in self.walk() if call.name == name]
        if not found:
            raise ValueError(f"no call of {name!r}; there are {', '.join(sorted({c.name for _, c in self.walk()}))}")
        return found

    def tree(self) -> str:
        """Who calls whom, indented."""
        return "\n".join(f"{'    ' * depth}{call.name}" for depth, call in self.walk())


@contextmanager
def watch(llm: LLM) -> Iterator[Watch]:
    """Record the calls between the layers of `llm` for as long as the block lasts."""
    outermost, open_calls = Watch(), list[Call]()
    wait_for_device = _waiter()

    def watched(lane: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_record(*args: Any, **options: Any) -> Any:
            call = Call(lane, name, args, time.perf_counter())
            (open_calls[-1].inside if open_calls else outermost).append(call)
            open_calls.append(call)
            try:
                call.result = method(*args, **options)
                wait_for_device()
                return call.result
            finally:
                open_calls.pop()
                call.stop = time.perf_counter()

        return call_and_record

    replaced = []
    try:
        for lane, owner, name in _stations(llm):
            method = getattr(owner, name)
            replaced.append((owner, name, vars(owner).get(name)))
            said = type(method).__name__ if name == "sampler" else f"{type(owner).__name__}.{name}"
            setattr(owner, name, watched(lane, said, method))
        yield outermost
    finally:
        for owner, name, own in reversed(replaced):
            delattr(owner, name)
            if own is not None:
                setattr(owner, name, own)


def _waiter() -> Callable[[], None]:
    """A GPU computes on after a call has returned: without waiting, its time would be somebody else's."""
    import torch

    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def _stations(llm: LLM) -> list[tuple[str, Any, str]]:
    """(lane, object, method) of all that is watched, as far as this engine has it."""
    engine: Any = llm.engine
    core, scheduler = engine.core, engine.core.scheduler
    stations = [
        ("front end", engine, "add_request step"),
        ("front end", engine.input_processor, "process"),
        ("front end", engine.output_processor, "add_request process_outputs"),
        ("core", core, "add_request abort_requests step"),
        ("scheduler", scheduler, "add_request schedule update finish_requests"),
        ("memory", scheduler.kv, "allocate free"),
        ("worker", core.executor, "execute"),
    ]
    worker = getattr(core.executor, "worker", None)
    if worker is not None:
        runner = worker.runner
        stations += [
            ("worker", worker, "execute"),
            ("runner", runner, "execute update_states forward sample sampler"),
            ("model", runner.model, "forward logits"),
        ]
    return [(lane, owner, name) for lane, owner, names in stations for name in names.split() if hasattr(owner, name)]


def lane_times(calls: Sequence[Call]) -> dict[str, float]:
    """Seconds that each lane spent itself, over all these calls and those below them."""
    spent = dict.fromkeys(LANES, 0.0)
    for outer in calls:
        for _, call in outer.walk():
            spent[call.lane] += call.own
    return spent


def lane_shares(calls: Sequence[Call]) -> dict[str, float]:
    """Each lane's part of the time, 0 to 1."""
    spent = lane_times(calls)
    total = sum(spent.values())
    return {lane: seconds / total for lane, seconds in spent.items()}


def own_stretches(call: Call) -> list[tuple[float, float]]:
    """When a call was at work itself: (start, stop), without the watched calls that it made."""
    edges = [call.start, *(edge for inner in call.inside for edge in (inner.start, inner.stop)), call.stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


@contextmanager
def watch_states() -> Iterator[Counter[tuple[str, str]]]:
    """Count all changes of state, (old, new), of all requests of this process while the block lasts."""
    from pagedvllm.request import Request, RequestStatus

    plain, seen = vars(Request)["status"], Counter[tuple[str, str]]()

    def change(request: Request, new: RequestStatus) -> None:
        old = request.status
        plain.fset(request, new)
        seen[old.name, new.name] += 1

    Request.status = property(plain.fget, change, doc=plain.__doc__)  # type: ignore[assignment]
    try:
        yield seen
    finally:
        Request.status = plain  # type: ignore[method-assign]
