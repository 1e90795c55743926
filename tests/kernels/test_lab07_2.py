"""Lab 7.2's grader and engine hook: right kernels pass, the mistakes people make fail with words that help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pagedvllm.teach import notebooks
from pagedvllm.teach.cases.lab07_2 import in_engine
from pagedvllm.teach.labs import grade

NOTEBOOK = Path(__file__).resolve().parents[2] / "labs/lab07_2_paged_kernel.ipynb"
TASKS = ("7.2.1", "7.2.2", "7.2.3")
ANSWERS = dict(zip(TASKS, ("lse", "product", "decode"), strict=True))


def source(tag: str) -> str:
    (cell,) = (c for c in notebooks.code_cells(notebooks.read(NOTEBOOK)) if tag in notebooks.tags(c))
    return str(cell.source)


def answer(task: str, tmp_path: Path, kind: str = "solution", change: tuple[str, str] = ("", "")) -> Callable[..., Any]:
    """The stub's or the solution's function, from a file (Triton reads sources), with one piece of text replaced."""
    text = source(f"{kind}:{task}")
    assert change[0] in text
    file = tmp_path / "answer.py"
    file.write_text(text.replace(*change) if change[0] else text)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "torch": torch, "__name__": "answer"}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    found: Callable[..., Any] = namespace[ANSWERS[task]]
    return found


def outcome(task: str, function: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, function, solution=True).passed
    return passed, capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_stubs_fail_and_solutions_pass(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome(task, answer(task, tmp_path, "task"), capsys)
    assert not passed and "not attempted" in said
    assert outcome(task, answer(task, tmp_path), capsys)[0]


@pytest.mark.parametrize(
    ("task", "right", "wrong", "words"),
    [
        ("7.2.1", 'other=float("-inf")', "other=0.0", "a last tile that is not full"),
        ("7.2.1", "mask=column < n, ", "mask=column < n + 1, ", "NaN"),
        ("7.2.1", "total * tl.exp(top - base)", "total", "three tiles"),
        ("7.2.1", "tl.exp(x - base)", "tl.exp(x - new_top)", "a whole tile of -inf comes first"),
        ("7.2.2", "(row < m)[:, None] & (part < k)[None, :]", "(row < m)[:, None] & (part < k + 1)[None, :]", "NaN"),
        ("7.2.2", "tl.dot(a, tl.trans(b), acc", "tl.dot(a, b, acc", "one tile: input"),
        ("7.2.2", "acc = tl.dot(a, tl.trans(b), acc,", "acc = tl.dot(a, tl.trans(b),", "the sum in three parts"),
        ("7.2.3", "exists = i * BLOCK + place < length", "exists = i * BLOCK + place <= length", "NaN"),
        ("7.2.3", "tl.load(v_cache_ptr + at, mask=exists[:, None], other=0.0)", "tl.load(v_cache_ptr + at)", "NaN"),
        ("7.2.3", "+ seq * table_stride", "", "three sequences of different lengths"),
        ("7.2.3", "head // (HEADS // KV_HEADS)", "head % KV_HEADS", "off by"),
        ("7.2.3", "acc = acc * shrink + ", "acc = acc + ", "a last block that is not full"),
    ],
)
def test_a_wrong_kernel_fails(
    task: str, right: str, wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed, said = outcome(task, answer(task, tmp_path, change=(right, wrong)), capsys)
    assert not passed and words in said


def test_torch_is_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("7.2.1", lambda x: torch.logsumexp(x, 1), capsys)
    assert not passed and "no kernel was started: torch did the work" in said


def test_other_shapes_and_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected shape [16, 16], got [16, 1]" in outcome("7.2.2", lambda a, b: a[:, :1], capsys)[1]
    assert "expected a tensor, got int" in outcome("7.2.2", lambda a, b: 1, capsys)[1]


def test_inside_the_engine(tmp_path: Path) -> None:
    assert in_engine(answer("7.2.3", tmp_path)) == "same tokens, 8 calls of decode"
    assert in_engine(answer("7.2.3", tmp_path, "task")) == "not attempted"
    reversed_values = answer("7.2.3", tmp_path, change=("tl.sum(weights[:, None] * v, axis=0)", "dim"))
    assert in_engine(reversed_values).startswith("other tokens: ")
