"""Chapter 5: what its helpers watch is what happens, its debugger stops where it should, its pictures say the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pagedvllm.engine.core import EngineCore
from pagedvllm.llm import LLM
from pagedvllm.request import TRANSITIONS, RequestStatus
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.scheduler import Scheduler
from pagedvllm.teach import debugging, engine_figures, layers, notebooks, profiles
from pagedvllm.teach.cases.lab05 import SCRIPTED
from pagedvllm.teach.scripted import ScriptedExecutor
from pagedvllm.teach.source_map_page import load

NOTEBOOK = Path(__file__).resolve().parents[2] / "book" / "ch05_engine_skeleton.ipynb"
THREE = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """An engine without a model: its executor says token 7."""
    return LLM(distributed_executor_backend=SCRIPTED, block_size=4, num_gpu_blocks_override=5, max_model_len=16)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """(figure, alt) of everything that is shown."""
    figures: list[tuple[Any, str]] = []
    monkeypatch.setattr(engine_figures, "show", lambda fig, alt: figures.append((fig, alt)))
    return figures


# ---------------------------------------------------------------- watching


def test_the_tree_is_who_calls_whom(llm: LLM) -> None:
    with layers.watch(llm) as calls:
        llm.generate([[5, 6]], THREE)
    steps = calls.find("LLMEngine.step")
    assert len(steps) == 3
    assert layers.Watch(steps[-1:]).tree().split() == [
        *("LLMEngine.step", "EngineCore.step", "Scheduler.schedule", "PrefixCachingManager.allocate"),
        *("ScriptedExecutor.execute", "Scheduler.update", "PrefixCachingManager.free"),
        *("OutputProcessor.process_outputs", "EngineCore.abort_requests", "Scheduler.finish_requests"),
    ]
    assert calls.find("ScriptedExecutor.execute")[0].result.sampled == [[7]]
    with pytest.raises(ValueError, match=r"no call of 'Model.forward'; there are EngineCore.abort_requests"):
        calls.find("Model.forward")


def test_the_shares_are_the_whole_and_nothing_is_counted_twice(llm: LLM) -> None:
    with layers.watch(llm) as calls:
        llm.generate([[5, 6]], THREE)
    assert sum(layers.lane_times(calls).values()) == pytest.approx(sum(call.seconds for call in calls))
    assert sum(layers.lane_shares(calls).values()) == pytest.approx(1)
    for _, call in calls.walk():
        stretches = layers.own_stretches(call)
        assert sum(stop - start for start, stop in stretches) == pytest.approx(call.own)
        assert all(start <= stop for start, stop in stretches)


def test_watching_leaves_the_engine_as_it_was(llm: LLM) -> None:
    engine: Any = llm.engine
    objects = [engine, engine.core, engine.core.scheduler, engine.core.executor, engine.output_processor]
    before = [set(vars(each)) for each in objects]
    with pytest.raises(RuntimeError, match="inside"), layers.watch(llm):
        assert "step" in vars(engine.core)
        raise RuntimeError("inside")
    assert [set(vars(each)) for each in objects] == before
    assert engine.core.step.__func__ is EngineCore.step


def test_a_call_that_raises_is_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ScriptedExecutor, "execute", fail)
    with layers.watch(llm) as calls, pytest.raises(MemoryError):
        llm.generate([[5]], THREE)
    assert all(call.stop >= call.start for _, call in calls.walk())
    assert calls.find("LLMEngine.step")[0] in calls  # the outermost: nothing was left open above it


def test_states_are_counted_and_the_property_is_put_back(llm: LLM) -> None:
    from pagedvllm.request import Request

    plain = vars(Request)["status"]
    with layers.watch_states() as seen:
        llm.generate([[5] * 7, [6] * 7], SamplingParams(max_tokens=8, ignore_eos=True))
    assert vars(Request)["status"] is plain
    assert seen["WAITING", "RUNNING"] == seen["RUNNING", "FINISHED_LENGTH_CAPPED"] == 2
    assert seen["RUNNING", "PREEMPTED"] == seen["PREEMPTED", "RUNNING"] >= 1
    assert all(RequestStatus[new] in TRANSITIONS[RequestStatus[old]] for old, new in seen)


# ---------------------------------------------------------------- the debugger


def test_the_transcript_holds_what_was_typed_and_no_path(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["where", "p len(self.waiting), len(self.running)", "up", "p type(self).__name__", "continue"]
    with debugging.session(Scheduler.schedule, typed):
        llm.generate([[5, 6]], THREE)
    said = capsys.readouterr().out
    assert said.startswith("> sched/scheduler.py schedule()\n-> self.step += 1\n(Pdb) where\n")
    assert "(Pdb) p len(self.waiting), len(self.running)\n(1, 0)\n" in said
    assert "> engine/core.py step()\n" in said and "'EngineCore'" in said
    assert said.count("(Pdb) continue") == 1 and "/" not in said.replace("sched/", "").replace("engine/", "")
    assert not re.search(r"\(\d+\)\w", said)  # no line number


def test_it_stops_on_a_condition_and_only_once(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with debugging.session(Scheduler.schedule, ["p len(self.running)", "c"], when="len(self.running) == 2"):
        llm.generate([[5, 6], [7, 8]], THREE)
    assert capsys.readouterr().out.count("(Pdb)") == 2
    with debugging.session(Scheduler.schedule, ["c"], when="len(self.running) == 9"):
        assert llm.generate([[5]], THREE)[0].finished
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- profiles


def test_profiles_name_what_took_the_time() -> None:
    import torch

    matrix = torch.ones(400, 400)
    operations = profiles.top_operations(lambda: [matrix @ matrix for _ in range(5)])
    assert operations[0].name == "aten::mm" and operations[0].calls == 5 and 0.5 < operations[0].share <= 1
    functions = profiles.top_functions(lambda: [sorted(range(100_000, 0, -1)) for _ in range(5)])
    assert functions[0].name in ("built-in sorted", "test_chapter05.py <listcomp>", "test_chapter05.py <lambda>")
    table = profiles.table(functions)
    assert "/" not in table and len(table.splitlines()) == len(functions)


# ---------------------------------------------------------------- pictures


def test_the_call_chart_has_every_call_in_order(llm: LLM, shown: list[tuple[Any, str]]) -> None:
    with layers.watch(llm) as calls:
        llm.generate([[5, 6]], THREE)
    step = calls.find("LLMEngine.step")[0]
    engine_figures.call_chart(step, "one step")
    engine_figures.swimlane(step, "One step")
    engine_figures.shares({"a": layers.lane_shares([step])})
    words = [text.get_text() for text in shown[0][0].axes[0].texts if text.get_text()]
    assert words == [call.name.split(".")[-1] for _, call in step.walk()]
    heights = [text.xy[1] for text in shown[0][0].axes[0].texts if text.get_text()]
    assert heights == sorted(heights) and len(set(heights)) == len(heights)
    assert shown[1][1].startswith("One step: which layer was at work when. Shares of the time: front end ")
    assert "a: front end" in shown[2][1]


def test_the_states_picture_knows_the_whole_table(shown: list[tuple[Any, str]]) -> None:
    engine_figures.states(TRANSITIONS, {("WAITING", "RUNNING"): 3, ("RUNNING", "FINISHED_ABORTED"): 1})
    fig, alt = shown[0]
    words = {text.get_text().replace("\n", "") for text in fig.axes[0].texts}
    assert {status.name.removeprefix("FINISHED_") for status in RequestStatus} <= words
    assert "RUNNING to FINISHED_ABORTED 1 times, WAITING to RUNNING 3 times" in alt
    arrows = [text for text in fig.axes[0].texts if text.arrow_patch is not None]
    unfinished = sum(not b.finished for others in TRANSITIONS.values() for b in others)
    assert len(arrows) == unfinished + 1  # of those to an end, only what was seen
    with pytest.raises(ValueError, match=r"WAITING.*PREEMPTED.* is not in the picture"):
        engine_figures.states(TRANSITIONS, {("WAITING", "PREEMPTED"): 1})


@pytest.mark.parametrize("old", ["WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_REMOTE_KVS"])
@pytest.mark.parametrize("new", [status.name for status in RequestStatus if status.finished])
def test_an_arrow_to_an_end_goes_through_no_other_state(shown: list[tuple[Any, str]], old: str, new: str) -> None:
    from matplotlib.path import Path as Line

    engine_figures.states(TRANSITIONS, {(old, new): 1})
    fig, _ = shown[0]
    fig.canvas.draw()
    texts = fig.axes[0].texts
    (way,) = [t.arrow_patch.get_path() for t in texts if t.arrow_patch and t.arrow_patch.get_linewidth() > 1]
    boxes = {t.get_text().replace("\n", ""): t.get_bbox_patch() for t in texts}
    others = [boxes[name].get_window_extent().padded(4) for name in engine_figures.PLACES if name != old]
    lines = [Line(points) for points in way.to_polygons(closed_only=False)]
    assert not any(line.intersects_bbox(box, filled=False) for line in lines for box in others)


def test_life(shown: list[tuple[Any, str]]) -> None:
    engine_figures.life([("RUNNING", 1, "On"), ("FINISHED_ABORTED", 0, "Once ")])
    assert shown[0][1].endswith("step 1: running, 1 blocks, 'On'; step 2: finished_aborted, 0 blocks, 'Once '.")


# ---------------------------------------------------------------- the text


def test_every_place_in_vllm_that_the_text_names_is_in_the_index() -> None:
    """`Class.method` names of the section on vLLM, in the files that the index holds."""
    text = "\n".join(c.source for c in notebooks.read(NOTEBOOK).cells if c.cell_type == "markdown")
    section = text[text.index("## In vLLM 0.30.0") : text.index("### V0 and V1")]
    _, index = load()
    symbols = {symbol for file in index.files.values() for symbol in file.symbols}
    named = set(re.findall(r"`((?:EngineCore|EngineCoreProc|Executor|VllmConfig)\.\w+)`", section))
    assert len(named) >= 6
    assert not {name for name in named if name not in symbols}
