"""Chapter 3: its state diagram is the engine's table, its helpers count right, its figures say what happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedvllm.request import TRANSITIONS, RequestStatus
from pagedvllm.teach import notebooks, schedule_figures
from pagedvllm.teach.drive import (
    fake_model,
    latencies,
    longest_stall,
    make_request,
    make_scheduler,
    play,
    totals,
)
from pagedvllm.teach.schedule_figures import Decision, decisions

NOTEBOOK = Path(__file__).resolve().parents[2] / "book" / "ch03_scheduler.ipynb"


def abc_trace():
    scheduler = make_scheduler(6, 4, 24, max_num_seqs=4, max_num_batched_tokens=8)
    return play(scheduler, [make_request("A", 5, 10), make_request("B", 9, 8), make_request("C", 3, 6)])


def test_the_state_diagram_is_the_table_of_transitions():
    text = "\n".join(c.source for c in notebooks.read(NOTEBOOK).cells if c.cell_type == "markdown")
    diagram = re.search(r"```mermaid\nflowchart TD\n    NEW(.*?)```", text, re.S)
    assert diagram
    drawn = re.findall(r"^\s*(\w+) -->\|.*?\| (\w+)", diagram[1], re.M)
    for name, sources, targets in re.findall(r"^\| `(WAITING_FOR_\w+)` \| (.*?) \| (.*?) \|", text, re.M):
        drawn += [(source, name) for source in re.findall(r"\w+", sources)]
        drawn += [(name, target) for target in re.findall(r"\w+", targets)]
        drawn.append((name, "FINISHED"))  # "From these three, too, a request can end at any time"

    def shown(status: RequestStatus) -> str:
        return "FINISHED" if status.finished else status.name

    table = {(shown(a), shown(b)) for a, others in TRANSITIONS.items() for b in others}
    assert set(drawn) == table and len(drawn) == len(table)
    for status in RequestStatus:  # the six ends are named below it
        assert status.name in text or f"`{status.name.removeprefix('FINISHED')}`" in text


def test_play_and_totals():
    trace = abc_trace()
    assert totals(trace) == {"steps": 17, "computed": 54, "generated": 24, "preemptions": 2}
    assert trace[4]["preempted"] == ["C"] and trace[5]["preempted"] == ["B"]


def test_play_lets_requests_arrive_in_their_step_and_idles_between():
    trace = play(
        make_scheduler(8), [make_request("late", 4, 1, at=5), make_request("A", 4, 1), make_request("B", 4, 1)]
    )
    assert trace[0]["arrived"] == ["A", "B"]
    assert trace[5]["arrived"] == ["late"] and trace[3] == {"step": 3, "idle": True}


def test_latencies_by_hand():
    """A: first token in its own first step. B needs two steps for its prompt; a preemption stretches its TPOT."""
    measured = latencies(abc_trace())
    assert measured["A"] == (1, 1.0)
    assert measured["B"] == (2, (14 - 1) / 7)  # tokens in steps 1 to 14, eight of them
    late = play(make_scheduler(8), [make_request("late", 4, 3, at=5)])
    assert latencies(late) == {"late": (1, 1.0)}


def test_the_longest_stall_is_that_of_the_preempted():
    assert longest_stall(abc_trace()) == 12 - 3  # C: preempted in step 4, its next token in step 12
    assert longest_stall(play(make_scheduler(8), [make_request("A", 4, 5), make_request("B", 4, 1, at=40)])) == 1


def test_play_gives_up(monkeypatch):
    monkeypatch.setattr("pagedvllm.teach.drive.MOST_STEPS", 10)
    with pytest.raises(RuntimeError, match="still 1 requests after 10 steps"):
        play(make_scheduler(8), [make_request("A", 4, 50)])


def test_the_fake_model_gives_no_token_inside_a_prompt():
    scheduler = make_scheduler(8, max_num_batched_tokens=8)
    scheduler.add_request(make_request("A", 20, 2))
    output = scheduler.schedule()
    assert fake_model(scheduler, output).sampled == [[]]


def test_decisions():
    trace = abc_trace()
    assert decisions(trace, 0) == [Decision("A", "admit", 5), Decision("B", "admit", 3), Decision("C", "wait", 0)]
    assert decisions(trace, 4) == [Decision("A", "run", 1), Decision("B", "run", 1), Decision("C", "preempt", 0)]
    assert decisions(trace, 5) == [Decision("A", "run", 1), Decision("B", "preempt", 0), Decision("C", "wait", 0)]
    assert [d.kind for d in decisions(trace, 10)] == ["admit", "wait"]  # A has finished


@pytest.fixture
def shown(monkeypatch):
    """(figure, alt) of everything that is shown."""
    figures = []
    monkeypatch.setattr(schedule_figures, "show", lambda fig, alt: figures.append((fig, alt)))
    return figures


def test_timeline_counts_what_is_computed_again(shown):
    schedule_figures.timeline(abc_trace(), budget=8, title="Three")
    fig, alt = shown[0]
    assert alt == "Three: 3 requests over 16 steps, 2 preemptions, 16 of 54 tokens computed again."
    assert {text.get_text() for text in fig.axes[0].texts} == {"1", "2", "3", "5", "6", "8"}


def test_step_flow_says_every_decision(shown):
    schedule_figures.step_flow([("A", "run", 1), ("B", "admit", 7), ("C", "wait", 0)], budget=8, title="One")
    assert shown[0][1] == "One: A goes on, 1 token; B is admitted, 7 tokens; C waits. 8 of 8 tokens."


def test_other_figures(shown):
    schedule_figures.waits({"fcfs": {"chat": 2.0, "document": 3.5}}, "steps", title="TTFT")
    schedule_figures.cliff([10, 20], [1.0, 2.0], [3, 0], [25, 1])
    schedule_figures.lives({"A": ["WAITING", "RUNNING", "FINISHED_STOPPED"]})
    assert shown[0][1] == "TTFT. fcfs: chat 2, document 3.5."
    assert "from 2.0 to 1.0" in shown[1][1] and "from 1 to 25 steps" in shown[1][1]
    assert shown[2][1] == "A: waiting, running, finished_stopped."
