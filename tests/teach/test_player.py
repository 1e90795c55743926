"""The trace player's bytes: complete, small, the same each time, and harmless whatever a request is called."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedvllm import teach
from pagedvllm.replay import make_request, make_scheduler, replay, run_model
from pagedvllm.teach import trace_player
from pagedvllm.workload import load

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(path.name.removesuffix(".trace.jsonl") for path in GOLDEN.glob("*.trace.jsonl"))
SHOWN = ("arrived", "aborted", "scheduled", "new", "resumed", "admitted_computed", "preempted", "sampled", "finished")
SAME = ("running_queue", "waiting_queue", "free_after_schedule", "free_after_update")


def lines_of(name):
    return [json.loads(line) for line in (GOLDEN / f"{name}.trace.jsonl").read_text().splitlines()]


def decode(runs):
    out = []
    for run in runs.split():
        first, _, last = run.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def unfold(data):
    """What player_web/trace.js does, the other way round from `compact`."""
    lasting, tables = {}, {}
    for step in data["steps"]:
        tables = {**tables, **step.get("tables", {})}
        tables = {name: table for name, table in tables.items() if table is not None}
        lasting |= {key: value for key, value in step.items() if key in trace_player.LASTING}
        yield {**lasting, **step, "tables": tables}


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_field_comes_back(name):
    lines = lines_of(name)
    shown = teach.player(lines)
    full = list(unfold(json.loads(json.dumps(shown.data))))
    assert len(full) == len(lines) - 1 > 5
    for line, step in zip(lines, full, strict=False):
        assert step["step"] == line["step"]
        if line.get("idle"):
            assert step["idle"]
            continue
        for field in SHOWN:
            assert step.get(field, type(line[field])()) == line[field], field
        assert {field: step[field] for field in SAME} == {field: line[field] for field in SAME}
        assert {name: decode(table) for name, table in step["tables"].items()} == line["blocks"]
        assert decode(step["cached"]) == line["cached_blocks"]
        assert decode(step["free_queue"]) == line["free_queue"]
        counts = {block: int(count) for count, runs in step["refs"].items() for block in decode(runs)}
        assert counts == {int(block): count for block, count in line["ref_cnt"].items()}
    workload = load(GOLDEN / f"{name}.workload.json")
    assert shown.data["blocks"] == workload.engine.num_blocks - 1
    assert set(shown.data["requests"]) == {request.id for request in workload.requests}


def test_small():
    """A third of the trace at most, over all of them; the code comes once with each element."""
    data = sum(len(json.dumps(teach.player(lines_of(name)).data, separators=(",", ":"))) for name in NAMES)
    assert data < sum((GOLDEN / f"{name}.trace.jsonl").stat().st_size for name in NAMES) / 3
    assert len(teach.player([{"step": 0, "idle": True}]).element()) < 45_000


def test_equal_traces_give_equal_bytes():
    workload = load(GOLDEN / "w04_prefix_sharing.workload.json")
    one, two = (teach.player(replay(workload), workload.engine, title="t")._repr_mimebundle_() for _ in range(2))
    assert one == two
    assert list(one) == ["text/html", "text/plain"]


def test_a_recorder_knows_its_limits():
    workload = load(GOLDEN / "n08_priority_preempt.workload.json")
    scheduler = make_scheduler(workload)
    for index, item in enumerate(workload.requests):
        scheduler.add_request(make_request(index, item))
    while scheduler.has_requests():
        output = scheduler.schedule()
        scheduler.update(output, run_model(workload, scheduler, output))
    data = teach.player(scheduler).data
    assert (data["max_num_batched_tokens"], data["block_size"], data["blocks"]) == (64, 4, 23)
    assert data["prompts"]["p00"] == 9
    assert sum(len(step.get("preempted", ())) for step in data["steps"]) > 0
    assert teach.player(scheduler.trace).data.get("block_size") is None


def test_counted_and_grouped_blocks():
    workload = load(GOLDEN / "n08_priority_preempt.workload.json")
    data = teach.player(replay(workload, "counting")).data
    assert data["steps"][0]["tables"] == {"p00": 3, "p01": 3, "p02": 2}
    assert data["blocks"] == 23
    hybrid = {"step": 0, "blocks": {"h": [[0, 1, 13], [4, 5, 16]]}, "free_after_schedule": 9}
    assert teach.player([hybrid]).data["steps"][0]["tables"] == {"h": "0-1 13|4-5 16"}
    assert teach.player([hybrid]).data["blocks"] == 14


def test_runs():
    assert trace_player.runs([1, 2, 3, 9, 4]) == "1-3 9 4"
    assert trace_player.runs([]) == ""
    assert trace_player.runs([5, 4, 3]) == "5 4 3"


def test_text():
    shown = teach.player(GOLDEN / "n08_priority_preempt.trace.jsonl", title="priorities")
    text = repr(shown)
    assert text.startswith("[trace player] priorities: 50 steps, 10 requests, 23 blocks; 321 tokens computed")
    assert "3 preemptions (p01 at step 5, p03 at step 8, p00 at step 13)" in text
    assert shown._repr_mimebundle_()["text/plain"] == text


def test_names_are_never_html():
    evil = "</script><img src=x onerror=alert(1)>\u2028"
    step = {"step": 0, "arrived": [evil], "scheduled": {evil: 1}, "running_queue": [evil], "blocks": {evil: [1]}}
    html = teach.player([step], title=evil).element()
    assert html.count("</script>") == html.count("<script") == 2
    assert "<img" not in html
    assert "\u2028" not in html.split("<script", 1)[1]
    stored = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert json.loads(stored[1])["requests"] == [evil]


def test_nothing_comes_from_elsewhere():
    html = teach.player(lines_of("w04_prefix_sharing")).element()
    assert not re.search(r"https?://|\bsrc=|@import|url\(|fetch\(|innerHTML|eval\(", html)


@pytest.mark.parametrize(
    ("trace", "error", "message"),
    [
        ([], ValueError, "trace has no step"),
        ([{"end": True, "requests": {}}], ValueError, "trace has no step"),
        ([3], TypeError, "line 0 must be a dict"),
        ([{"step": 0, "idle": True}, {"a": 1}], TypeError, "line 1 must be a dict"),
    ],
)
def test_says_what_is_wrong(trace, error, message):
    with pytest.raises(error, match=message):
        teach.player(trace)


def test_says_which_line_is_not_json(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"step":0,"idle":true}\n{"step":\n')
    with pytest.raises(ValueError, match=r"t\.jsonl line 2 is not JSON"):
        teach.player(tmp_path / "t.jsonl")


def test_command_writes_a_page(tmp_path):
    page = tmp_path / "page.html"
    trace = GOLDEN / "w02_kv_pressure_fcfs.trace.jsonl"
    command = [sys.executable, "-m", "pagedvllm.teach", "player", str(trace), str(page), "--budget", "64"]
    done = subprocess.run([*command, "--block-size", "4"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[trace player] w02_kv_pressure_fcfs.trace.jsonl: 50 steps")
    assert '"max_num_batched_tokens":64,"block_size":4' in page.read_text("utf-8")


def test_the_name_stays_a_function():
    """A submodule of the same name would replace it in the package."""
    teach.player([{"step": 0, "idle": True}])
    assert callable(teach.player)
