"""Lab 5's grader: right answers pass; the mistakes people make fail with words that help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.engine.messages import EngineCoreRequest, SchedulerStats
from pagedvllm.engine.stop_strings import StopStrings
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from pagedvllm.sched.scheduler import Scheduler
from pagedvllm.teach import notebooks
from pagedvllm.teach.cases import lab05
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


# ---------------------------------------------------------------- 5.1

RIGHT = """
1 | RUNNING          | 1 | "On"
2 | RUNNING          | 1 | "Once "
3 | RUNNING          | 2 | "Once E"
4 | PREEMPTED        | 0 | "Once E"
5 | PREEMPTED        | 0 | "Once E"
6 | RUNNING          | 2 | "Once ENV a"
7 | RUNNING          | 2 | "Once ENV and"
8 | FINISHED_ABORTED | 0 | "Once ENV and "
"""


def test_drawings(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("5.1", RIGHT, capsys)[0]
    assert not outcome("5.1", None, capsys)[0]  # untouched
    for wrong, words in [
        (RIGHT.replace("FINISHED_ABORTED", "FINISHED_STOPPED"), "step 8: look again at the state"),
        (RIGHT.replace('2 | "Once E"', '1 | "Once E"'), "step 3: look again at the blocks"),
        (RIGHT.replace('"On"', '"Once"'), "step 1: look again at the text"),
        (RIGHT.replace("PREEMPTED        | 0", "WAITING | 2"), "step 4: look again at the state and the blocks"),
        (RIGHT.replace("RUNNING", "RUNS"), "'RUNS' is no state; there are WAITING"),
        (RIGHT.replace('8 | FINISHED_ABORTED | 0 | "Once ENV and "', ""), "step 8 is not in the drawing"),
        (RIGHT.replace('"On"', "On"), "is not of the form"),
        (RIGHT + '9 | RUNNING | 3 | "nonsense"', "no other step: step 9 is none of B's"),
        (RIGHT + '0 | WAITING | 0 | ""', "step 0 is none of B's"),
        ('3 | RUNNING | 7 | "x"' + RIGHT, "step 3 is drawn twice"),
        ({1: "RUNNING"}, "the drawing must be text, got dict"),
    ]:
        passed, said = outcome("5.1", wrong, capsys)
        assert not passed and words in said


# ---------------------------------------------------------------- 5.2


class Counting(Scheduler):
    num_preempted_reqs = 0

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        self.num_preempted_reqs += self.count(output)
        return super().update(output, result)

    def count(self, output: SchedulerOutput) -> int:
        return len(output.preempted_req_ids)


class CountingEarlier(Scheduler):
    """Also right, as long as no step fails."""

    num_preempted_reqs = 0

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self.num_preempted_reqs += len(output.preempted_req_ids)
        return output


class Metered(EngineCore):
    def preempted(self) -> int:
        return self.scheduler.num_preempted_reqs  # type: ignore[attr-defined,no-any-return]

    def waiting(self) -> int:
        return sum(request.num_tokens for request in self.scheduler.waiting)

    def make_stats(self) -> SchedulerStats:
        stats = super().make_stats()
        counts = {"num_preempted_reqs": self.preempted(), "num_waiting_tokens": self.waiting()}
        return lab05.MoreStats(**vars(stats), **counts)


class GaugeInsteadOfCounter(Counting):
    def schedule(self) -> SchedulerOutput:
        self.num_preempted_reqs = 0
        return super().schedule()


class StepsNotRequests(Counting):
    def count(self, output: SchedulerOutput) -> int:
        return bool(output.preempted_req_ids)


class ForgetsWhoHasEnded(Metered):
    def preempted(self) -> int:
        return sum(request.num_preemptions for request in self.scheduler.requests.values())


class PromptsOnly(Metered):
    def waiting(self) -> int:
        return sum(request.num_prompt_tokens for request in self.scheduler.waiting)


class RequestsNotTokens(Metered):
    def waiting(self) -> int:
        return len(self.scheduler.waiting)


@pytest.mark.parametrize("scheduler", [Counting, CountingEarlier])
def test_a_right_metric_passes(scheduler: type[Scheduler], capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("5.2", partial(lab05.stats_of, scheduler, Metered), capsys)[0]


def test_the_books_solution_counts_each_preemption_once_when_steps_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a step that failed are named again by the next one, and so are those that it preempted."""
    notebook = notebooks.read(Path(__file__).parents[2] / "labs/lab05_engine_skeleton.ipynb")
    solution = next(c.source for c in notebooks.code_cells(notebook) if "solution:5.2" in notebooks.tags(c))
    names: dict[str, Any] = {"Scheduler": Scheduler, "EngineCore": EngineCore, "MoreStats": lab05.MoreStats}
    exec(solution, names)
    monkeypatch.setattr(lab05, "AnswerScheduler", names["CountingScheduler"])
    settings = lab05.Situation((), blocks=4).settings
    core = names["MeteredCore"](EngineConfig.create(**settings, scheduler_cls=f"{lab05.__name__}:AnswerScheduler"))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for name, prompt in (("A", 4), ("B", 4), ("C", 3), ("D", 3)):
        core.add_request(EngineCoreRequest(name, [1] * prompt, params, (), 0.0))
    requests = list(core.scheduler.requests.values())
    core.step()
    with monkeypatch.context() as broken:
        broken.setattr(core.executor, "execute", lambda output: 1 / 0)
        for _ in range(2):  # the first one preempts C and D, and takes A and B with it
            with pytest.raises(ZeroDivisionError):
                core.step()
    while core.scheduler.requests:
        stats = core.step().scheduler_stats
        assert stats.num_preempted_reqs == sum(request.num_preemptions for request in requests)
    assert stats.num_preempted_reqs > 4


@pytest.mark.parametrize(
    ("scheduler", "core", "words"),
    [
        (GaugeInsteadOfCounter, Metered, "after step 5 num_preempted_reqs should be 1, and is 0"),
        (StepsNotRequests, Metered, "after step 2 num_preempted_reqs should be 2, and is 1"),
        (Counting, ForgetsWhoHasEnded, "a counter never falls"),
        (Counting, PromptsOnly, "after step 4 num_waiting_tokens should be 6, and is 3"),
        (Counting, RequestsNotTokens, "one seat: the others wait"),
        (Scheduler, Metered, "raised AttributeError"),
    ],
)
def test_a_wrong_metric_fails(
    scheduler: type[Scheduler], core: type[EngineCore], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    passed, said = outcome("5.2", partial(lab05.stats_of, scheduler, core), capsys)
    assert not passed and words in said


def test_the_stub_of_the_metric_counts_as_not_attempted(capsys: pytest.CaptureFixture[str]) -> None:
    class Stub(Scheduler):
        def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
            raise NotImplementedError("your code")

    assert "not attempted" in outcome("5.2", partial(lab05.stats_of, Stub, Metered), capsys)[1]


# ---------------------------------------------------------------- 5.3


class Matcher:
    """A right solution, with switches that spoil it."""

    only_in_piece = holds_nothing = holds_longest = first_in_list = leftmost = goes_on = drops_rest = False

    def __init__(self, stop: list[str]) -> None:
        self.stop, self.met, self.held = stop, None, ""  # type: list[str], str | None, str

    def add(self, piece: str) -> str:
        if self.met is not None and not self.goes_on:
            return ""
        text = piece if self.only_in_piece else self.held + piece
        found = [(text.find(s) + len(s), i, s) for i, s in enumerate(self.stop) if s in text]
        if self.leftmost:
            found = [(text.find(s), i, s) for _, i, s in found]
        if found:
            end, _, self.met = found[0] if self.first_in_list else min(found)
            self.held = ""
            return text[:end] if self.leftmost else text[: end - len(self.met)]
        ends = [text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) for s in self.stop)]
        self.held = ends[0] if ends and not self.holds_nothing else ""
        if self.holds_longest:
            self.held = text[max(len(text) - max(map(len, self.stop)) + 1, 0) :]
        return text[: len(text) - len(self.held)]

    def finish(self) -> str:
        return "" if self.drops_rest else self.held


def test_a_right_matcher_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("5.3", partial(lab05.run_matcher, Matcher), capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("only_in_piece", "in two pieces"),
        ("holds_nothing", "in two pieces"),
        ("holds_longest", "nothing is held back that cannot be part of one"),
        ("first_in_list", "the one that is complete first"),
        ("leftmost", "not passed"),
        ("goes_on", "nothing comes after it"),
        ("drops_rest", "what looks like a beginning comes out at the end"),
    ],
)
def test_a_wrong_matcher_fails(mistake: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = type("Wrong", (Matcher,), {mistake: True})
    passed, said = outcome("5.3", partial(lab05.run_matcher, wrong), capsys)
    assert not passed and words in said


STRINGS = st.lists(st.text("ab. ", min_size=1, max_size=5), min_size=1, max_size=3)


@given(STRINGS, st.lists(st.text("ab. ", max_size=4), max_size=9))
def test_the_engine_ends_where_the_matcher_does_and_never_takes_text_back(stop: list[str], pieces: list[str]) -> None:
    expected = lab05.run_matcher(lab05.LeastHeldBack, stop, pieces)
    text, shown = StopStrings(SamplingParams(stop=stop)), ""
    for number, piece in enumerate(pieces):
        ended = text.add(piece)
        assert text.shown(ended).startswith(shown)
        shown = text.shown(ended)
        certain = "".join(expected[: number + 1])
        assert certain.startswith(shown)  # it holds back at least what must be held back
        if ended:
            break
    assert (text.shown(True), text.met) == ("".join(expected[:-1]), expected[-1])
