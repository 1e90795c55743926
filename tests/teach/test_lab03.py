"""Lab 3's grader: right answers of every kind pass, the mistakes people make fail with words that help."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pagedvllm.sched.policy import FCFSQueue, PriorityQueue
from pagedvllm.teach.cases import lab03
from pagedvllm.teach.cases.lab03 import AgeingQueue, serve
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


# ---------------------------------------------------------------- 3.1


class Unsorted(AgeingQueue):
    """Picks right, but takes out the oldest."""

    def pop(self):
        return FCFSQueue.pop(self)


class LastVictim(AgeingQueue):
    def victim(self, running):
        return len(running) - 1


class StrictWithinPatience(AgeingQueue):
    """Ages the wrong way round: waiting makes a request weaker."""

    def peek(self):
        return min(self, key=lambda r: (r.priority * 20 - r.arrival_time, r.arrival_time))


def test_a_policy_right(capsys):
    assert outcome("3.1", partial(serve, AgeingQueue), capsys)[0]


@pytest.mark.parametrize("queue", [FCFSQueue, PriorityQueue, LastVictim, StrictWithinPatience])
def test_a_policy_wrong(queue, capsys):
    passed, text = outcome("3.1", partial(serve, queue), capsys)
    assert not passed and "should be '" in text and "and is '" in text


def test_a_policy_that_breaks_the_queue_says_so(capsys):
    passed, text = outcome("3.1", partial(serve, Unsorted), capsys)
    assert not passed and ("raised" in text or "should be" in text)


def test_every_case_needs_its_rule():
    """No case passes with every wrong queue; preemption and resumption occur."""
    cases = lab03._queue_cases()
    wrong = (FCFSQueue, PriorityQueue, LastVictim, StrictWithinPatience)
    missed = dict.fromkeys(wrong, 0)
    events: list[str] = []
    for case in cases:
        expected = serve(AgeingQueue, *case.args)
        events += expected
        for queue in wrong:
            missed[queue] += serve(queue, *case.args) != expected
    assert all(missed.values())
    assert any("is preempted" in e for e in events) and any("resumes" in e for e in events)


# ---------------------------------------------------------------- 3.2


def right_steps(situation):
    return [tuple(row) for row in lab03.outcome(situation)]


def test_steps_right(capsys):
    assert outcome("3.2", right_steps, capsys)[0]


def test_the_situations_teach_what_they_should():
    first, second, third = ({row.name: row for row in lab03.outcome(name)} for name in ("first", "second", "third"))
    assert first["B"].kind == "admit" and first["B"].tokens < 12  # a chunk
    assert second["B"].kind == "preempt" and second["C"].kind == "wait"
    assert next(iter(third)) == "A" and third["A"].kind == "preempt"  # the first of the list gives way


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "expected a decision for each of"),
        (lambda rows: [(*rows[0][:2], 5), *rows[1:]], "look again at A"),
        (lambda rows: [("A", "runs", 1), *rows[1:]], "must be one of run, idle, admit, preempt, wait; got 'runs'"),
        (lambda rows: 7, "expected a list of (name, decision, tokens)"),
        (lambda rows: [("A", "run", 1, 2), *rows[1:]], "expected a list of (name, decision, tokens)"),
    ],
)
def test_steps_wrong(change, message, capsys):
    passed, text = outcome("3.2", lambda name: change(right_steps(name)), capsys)
    assert not passed and message in text


def test_a_step_left_out(capsys):
    passed, text = outcome("3.2", lambda name: right_steps(name) if name == "first" else ..., capsys)
    assert not passed and "1 of 3" in text and "not drawn yet" in text


def test_describe_names_what_is_needed(capsys):
    lab03.describe("third")
    text = capsys.readouterr().out
    assert "third: budget 8, blocks of 4, 0 free, priority" in text
    assert "A running: 5 of 6 tokens computed, 2 blocks, priority 2" in text


# ---------------------------------------------------------------- 3.3


def test_lives_right(capsys):
    assert outcome("3.3", lambda name: lab03.lives()[name], capsys)[0]
    ends = {life[-1] for life in lab03.lives().values()}
    assert ends == {"FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_STOPPED"}
    assert "PREEMPTED" in lab03.lives()["B"]


@pytest.mark.parametrize(
    ("life", "message"),
    [
        (["WAITING", "RUNNING", "FINISHED_STOPPED"], "state 2 is not FINISHED_STOPPED"),
        (["WAITING", "RUNNING"], "it does not end there"),
        (["WAITING", "RUNNING", "FINISHED_LENGTH_CAPPED", "WAITING"], "it ends with FINISHED_LENGTH_CAPPED"),
        ("WAITING", "expected a list of names of states"),
    ],
)
def test_lives_wrong(life, message, capsys):
    passed, text = outcome("3.3", lambda name: life if name == "A" else lab03.lives()[name], capsys)
    assert not passed and message in text and "4 of 5" in text
