"""`pagedvllm check`: the report, its exit code, and that a fault shows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from pagedvllm.commands import check


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    code = check.run(parser.parse_args(options))
    return code, capsys.readouterr().out


def test_the_embedded_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] and report["problems"] == []
    assert report["self-test"]["answer"] == "The capital of France is Paris."
    assert report["embedded model"]["directory"].endswith("SmolLM2-135M-Instruct")


def test_without_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDVLLM_CACHE", str(tmp_path))
    code, out = run(capsys, "--no-model")
    assert code == 0
    assert "not run (--no-model)" in out and "not yet fetched" in out and out.rstrip().endswith("all is well")
    assert not any(tmp_path.iterdir())


def test_a_wrong_answer_is_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ANSWER", "The capital of France is Lyon.")
    code, out = run(capsys, "--json")
    report = json.loads(out)
    assert code == 1 and not report["ok"]
    assert "Paris" in report["problems"][0] and "Lyon" in report["problems"][0]


def test_no_fault_hides_the_rest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise ImportError("no torch here")

    installed = check.version

    def version(name: str) -> str:
        if name in ("torch", "triton"):
            raise check.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(check, "_devices", broken)
    monkeypatch.setattr(check, "version", version)
    code, out = run(capsys, "--no-model")
    assert code == 1
    assert "problem: devices: no torch here" in out and "problem: packages: torch is not installed" in out
    assert "triton is not installed" not in out and "2 problem(s)" in out
