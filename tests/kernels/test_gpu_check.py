"""gpu-check finds what is wrong: a mistake planted in each kernel, in a graph, in what the engine runs on.

That it passes as it is: `python -m benchmarks.gpu_check --dry`, a stage of `make test`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import graphs, kernels, launches, parity, stage
from benchmarks.gpu_check.models import TINY, without_weights
from benchmarks.gpu_check.stage import STAGES, Outcome, Setup, run_stage
from benchmarks.record import source_sha256
from pagedvllm.attention import triton_paged
from pagedvllm.kernels import ops
from pagedvllm.kernels import paged_attention as attention_module
from pagedvllm.kernels import rotary as rotary_module
from pagedvllm.tokenizer import Tokenizer
from pagedvllm.worker.cuda_graph import Graph, StaticBatch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding sees the null block: anything
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dry(tmp_path: Path) -> Setup:
    return Setup(True, 60.0, tmp_path)


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, 5 % too large."""

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        return tuple(x * 1.05 for x in result) if isinstance(result, tuple) else result * 1.05

    return wrong


def test_the_kernels_pass_as_they_are(dry: Setup) -> None:
    outcome = run_stage("kernels", dry)
    assert outcome.faults == [] and outcome.result["wrong"] == 0 and outcome.result["cases"] > 20


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (attention_module, "paged_attention"),
        (rotary_module, "rotate_and_write"),
        (ops, "rms_norm"),
        (ops, "add_rms_norm"),
        (ops, "silu_and_mul"),
        (ops, "rotate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_result_of_a_kernel_fails(dry: Setup, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.setattr(owner, name, scaled(getattr(owner, name)))
    outcome = run_stage("kernels", dry)
    asked_for = {"rotate": "rotary"}.get(name, name)
    assert outcome.faults and all(fault.startswith(asked_for) for fault in outcome.faults)
    assert outcome.result["wrong"] == len(outcome.faults)


def test_a_token_in_a_wrong_slot_and_a_lost_key_fail(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    write, attend = ops.write_cache, attention_module.paged_attention
    monkeypatch.setattr(ops, "write_cache", lambda k, v, kc, vc, slots: write(k, v, kc, vc, (slots + 1) % len(kc)))

    def without_last_key(q: Any, k: Any, v: Any, tables: Any, plan: Any, scale: float) -> Any:
        plan.seq_lens.sub_(1).clamp_(min=1)
        return attend(q, k, v, tables, plan, scale)

    monkeypatch.setattr(attention_module, "paged_attention", without_last_key)
    faults = run_stage("kernels", dry).faults
    assert {fault.split()[0] for fault in faults} == {"write_cache", "paged_attention"}


def test_not_a_number_is_an_error() -> None:
    assert kernels.error(torch.tensor([float("nan")]), torch.tensor([1.0])) > 1
    assert kernels.error(torch.tensor([float("inf")]), torch.tensor([1.0])) > 1
    assert kernels.error(torch.tensor([1000.01]), torch.tensor([1000.0])) < 1


def test_wrong_attention_fails_against_transformers(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention_module.paged_attention
    monkeypatch.setattr(triton_paged, "paged_attention", lambda q, *rest: attend(q * 3, *rest))
    outcome = Outcome()
    parity.compare(dry, outcome, "Qwen3", TINY, ["float32"])
    assert len(outcome.faults) == 1 and "a token is" in outcome.faults[0]


def test_a_stale_graph_fails(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StaticBatch.fill

    def forgetful(self: StaticBatch, *arguments: Any, **named: Any) -> None:
        tables = self.tables.clone()
        fill(self, *arguments, **named)
        self.tables.copy_(tables)

    monkeypatch.setattr(StaticBatch, "fill", forgetful)
    outcome = Outcome()
    graphs.same_tokens(dry, outcome)
    assert len(outcome.faults) == 1 and outcome.faults[0].startswith("tokens differ whose logits are")


def test_another_way_than_our_kernels_fails(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Setup.engine
    monkeypatch.setattr(Setup, "engine", lambda self, **changes: settings(self, **changes) | {"ops": "torch"})
    faults = launches.run(dry).faults
    assert any(fault.startswith("rms_norm_kernel: 0 launches") for fault in faults)
    eager = {"enforce_eager": True}
    monkeypatch.setattr(Setup, "engine", lambda self, **changes: settings(self, **changes) | eager)
    assert run_stage("launches", dry).faults and run_stage("graphs", dry).faults == ["the engine has no graphs"]


# ---------------------------------------------------------------- the run as a whole

FOUND = {"claim": "It is so.", "result": {"x": 1}, "faults": [], "details": {}, "not_run": "", "seconds": 2.0}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs all stages, whose outcomes are given; (exit status, names of the records)."""

    def run(**outcomes: dict[str, Any] | str) -> tuple[int, list[str]]:
        def run_child(names: list[str], dry: bool, limit: float, folder: Path) -> str:
            assert not dry and len(names) == 1
            found = outcomes.get(names[0], FOUND)
            if isinstance(found, str):
                return found
            (folder / f"{names[0]}.json").write_text(json.dumps(found))
            return ""

        monkeypatch.setattr(gpu_check, "run_child", run_child)
        monkeypatch.setattr(gpu_check, "gpu", lambda: "NVIDIA Test-1 80GB")
        status = gpu_check.check([], False, tmp_path / "evidence", 0.0)
        return status, sorted(path.name for path in (tmp_path / "evidence").glob("*"))

    return run


def test_a_failed_stage_fails_the_run_and_stops_no_other(
    on_a_card: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, records = on_a_card(
        kernels=FOUND | {"faults": ["rms_norm: 7 times"]},
        graphs="stopped after 80 s",
        notebooks=FOUND | {"not_run": "no model"},
    )
    assert status == 1
    assert records == [
        f"gpu_{name}_nvidia_test_1_80gb.json" for name in ("ceilings", "launches", "parity", "throughput")
    ]
    said = capsys.readouterr().out
    assert "fault: rms_norm: 7 times" in said and "fault: stopped after 80 s" in said
    assert "notebooks       2 s  not run: no model" in said


def test_a_record_has_the_fields_that_the_page_needs(on_a_card: Any, tmp_path: Path) -> None:
    status, records = on_a_card()
    assert status == 0 and len(records) == len(STAGES)
    table = (ROOT / "evidence/README.md").read_text("utf-8")
    fields = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    for name in records:
        record = json.loads((tmp_path / "evidence" / name).read_text())
        assert fields <= record.keys() and all(record[field] for field in fields)
        assert (record["device"], record["hardware"]) == ("cuda", "NVIDIA Test-1 80GB")
        assert record["source_sha256"] == source_sha256() and "driver" in record["environment"]


def test_a_stage_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """All stages one after the other ten times over: no machine comes to the last one in five seconds."""
    names = [stage.name for stage in STAGES]
    assert gpu_check.run_child(names * 10 + ["last"], True, 5.0, tmp_path) == "stopped after 5 s"
    assert gpu_check.run_child(names, True, 4.0, tmp_path) == "not started: the time was up"
    found = gpu_check.read(tmp_path / "last.json", "stopped after 5 s")
    assert found["faults"] == ["stopped after 5 s"] and gpu_check.verdict(found) == "FAILED"


def test_an_error_is_a_fault(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_cases", lambda *arguments: 1 // 0)
    assert run_stage("kernels", dry).faults == ["ZeroDivisionError: integer division or modulo by zero"]


def test_seconds_are_those_of_one_call(dry: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose clock is one here that each call moves on by 10 ms."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 1000 * (other.at - self.at)

    class Recorder:
        def __init__(self, device: torch.device) -> None:
            pass

        def record(self, function: Callable[[], torch.Tensor]) -> Graph:
            return Graph(lambda: function() and None, function())

    def call() -> None:
        clock[0] += 0.01

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(stage, "CudaGraphRecorder", Recorder)
    monkeypatch.setattr(Setup, "device", torch.device("cpu"))
    assert Setup(False, 1.0, dry.folder).seconds_of(call) == pytest.approx(0.01)
    assert clock[0] == pytest.approx(0.01 * (2 + 5 + 2 * 7 * 5)), "5 calls a round: 50 ms"


def test_models_without_a_network(tmp_path: Path) -> None:
    tokenizer = Tokenizer(without_weights(tmp_path / "m", TINY))
    assert tokenizer.vocab_size == 320 and tokenizer.eos_token_ids == (0,)
    assert tokenizer.decode(tokenizer.encode("Tag 😀")) == "Tag 😀"
