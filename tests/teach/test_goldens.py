"""vLLM's recorded decisions as the chapters use them: the same as the tests' own, and a comparison that can fail."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from pagedvllm.replay import replay
from pagedvllm.teach.goldens import BLOCK_FIELDS, FOLDER, NOT_COMPARED, compared_fields, differences, golden

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_the_golden_trace(name: str) -> None:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    assert data["workload"] == json.loads((GOLDEN / f"{name}.workload.json").read_text())
    lines = [json.loads(line) for line in (GOLDEN / f"{name}.trace.jsonl").read_text().splitlines()]
    assert differences(lines, data["trace"]) == [] and len(lines) == len(data["trace"])


@pytest.mark.parametrize("name", NAMES)
def test_our_decisions_are_the_recorded_ones(name: str) -> None:
    workload, theirs = golden(name)
    assert differences(theirs, replay(workload)) == []
    assert differences(theirs, replay(workload, "counting"), BLOCK_FIELDS) == []
    assert len(differences(theirs, replay(workload, "counting"))) > 10
    assert compared_fields(theirs) > compared_fields(theirs, BLOCK_FIELDS) > 100


def test_every_difference_is_found() -> None:
    workload, theirs = golden("n08_priority_preempt")
    ours = list(replay(workload))
    for name in ours[0].keys() - NOT_COMPARED:
        changed = copy.deepcopy(ours)
        changed[0][name] = "something else"
        assert [d.split(":")[:2] for d in differences(theirs, changed)] == [["step 0", f" {name}"]]
    swapped = copy.deepcopy(ours)
    swapped[0]["scheduled"] = dict(reversed(ours[0]["scheduled"].items()))
    assert len(differences(theirs, swapped)) == 1
    other = copy.deepcopy(ours)
    other[-1]["requests"]["p03"]["num_preemptions"] += 1
    assert len(differences(theirs, other)) == 1 and "p03 num_preemptions" in differences(theirs, other)[0]
    assert differences(theirs, ours[:-1]) == ["step 50: we have no such step"]
    assert differences(theirs[:-1], ours) == ["step 50: vLLM has no such step"]


def test_a_recording_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no recording 'n99'; there are n01"):
        golden("n99")
