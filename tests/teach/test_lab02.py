"""Lab 2's grader: right answers pass, the mistakes people make fail with words that help. And its data is real."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedvllm import LLM, SamplingParams, teach
from pagedvllm.roofline import decode_batch, step_cost
from pagedvllm.teach.cases import lab02
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


def flat(sequences: Any, change: Callable[..., dict[str, list[int]]] = lambda *_: {}) -> dict[str, list[int]]:
    """A right answer, some fields of which `change` spoils."""
    batch: dict[str, list[int]] = {name: [] for name in lab02.FIELDS} | {"query_start_loc": [0]}
    for token_ids, computed, new, first in sequences:
        end = computed + new
        batch["token_ids"] += token_ids[computed:end]
        batch["positions"] += range(computed, end)
        batch["slot_mapping"] += range(first + computed, first + end)
        batch["query_start_loc"].append(len(batch["token_ids"]))
        batch["seq_lens"].append(end)
        if end == len(token_ids):
            batch["sample_rows"].append(len(batch["token_ids"]) - 1)
    return batch | change(sequences, batch)


def test_flat_batch_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("2.1", flat, capsys)[0]
    assert outcome("2.1", lambda s: {name: tuple(v) for name, v in flat(s).items()}, capsys)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, b: {"token_ids": [t for ids, *_ in s for t in ids]}, "only those that are to be computed now"),
        (lambda s, b: {"token_ids": [t for i, _, n, _ in s for t in i[:n]]}, "and are not repeated"),
        (lambda s, b: {"positions": list(range(len(b["positions"])))}, "not within the batch"),
        (lambda s, b: {"positions": [i for *_, n, _ in s for i in range(n)]}, "where the computed tokens end"),
        (lambda s, b: {"slot_mapping": b["positions"]}, "begin at its first slot"),
        (lambda s, b: {"slot_mapping": [f + i for *_, n, f in s for i in range(n)]}, "hold the first slots"),
        (lambda s, b: {"query_start_loc": b["query_start_loc"][:-1]}, "the end of the last sequence"),
        (lambda s, b: {"query_start_loc": b["query_start_loc"][1:]}, "begins at 0"),
        (lambda s, b: {"seq_lens": [n for *_, n, _ in s]}, "computed earlier count as well"),
        (lambda s, b: {"seq_lens": [len(ids) for ids, *_ in s]}, "still to come do not count"),
        (lambda s, b: {"sample_rows": [e - 1 for e in b["query_start_loc"][1:]]}, "nothing is sampled"),
        (lambda s, b: {"sample_rows": b["query_start_loc"][1:]}, "rows count from 0"),
        (lambda s, b: {"extra": []}, "expected a dict with the keys"),
    ],
)
def test_flat_batch_wrong(change: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("2.1", lambda sequences: flat(sequences, change), capsys)
    assert not passed and message in printed


def sizes(
    config: Any, machine: Any, context: int, free: float, size: int, scale: float = 1.0
) -> tuple[int, int | None]:
    """By trying batch sizes."""

    def computing_takes_longer(batch_size: int) -> bool:
        cost = step_cost(config, decode_batch(batch_size, context), size)
        return cost.flops / machine.flops_per_second >= cost.num_bytes / machine.bytes_per_second

    one = step_cost(config, decode_batch(1, context), size)
    knee = next((n for n in range(1, 3000) if computing_takes_longer(n)), None)
    return int(free / scale // one.kv_bytes), knee


def test_batch_sizes_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("2.2", lab02.batch_sizes, capsys)[0]
    assert (
        [sizes(*case.args) for case in lab02.SIZE_CASES[:5]]
        == [  # type: ignore[misc]
            lab02.batch_sizes(*case.args)
            for case in lab02.SIZE_CASES[:5]  # type: ignore[misc]
        ]
    )
    knees = [lab02.batch_sizes(*case.args)[1] for case in lab02.SIZE_CASES]  # type: ignore[misc]
    assert None in knees and sum(knee is not None for knee in knees) >= 2


def weights_alone(config: Any, machine: Any, context: int, free: float, size: int) -> tuple[int, int]:
    return lab02.batch_sizes(config, machine, context, free, size)[0], math.ceil(machine.knee * size / 2)


def weights_taken_off(config: Any, machine: Any, context: int, free: float, size: int) -> tuple[int, int | None]:
    weights = step_cost(config, decode_batch(1, 1), size).weight_bytes
    return lab02.batch_sizes(config, machine, context, free - weights, size)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (weights_alone, "the caches are read as well"),
        (weights_taken_off, "the weights are already taken off"),
        (lambda *args: lab02.batch_sizes(*args)[0], "a pair is asked for"),
        (lambda *args: (lab02.batch_sizes(*args)[0], 0), "expected ("),
    ],
)
def test_batch_sizes_wrong(answer: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("2.2", answer, capsys)
    assert not passed and message in printed


def test_the_answer_lengths_are_the_models(embedded: Path) -> None:
    """The short ones, answered again."""
    data = json.loads((Path(teach.__file__).parent / "answer_lengths.json").read_text("utf-8"))
    assert len(data["answers"]) == 32 and max(a["output_tokens"] for a in data["answers"]) == data["max_tokens"]
    llm = LLM(str(embedded), engine="reference", dtype="float32", device="cpu")
    for answer in sorted(data["answers"], key=lambda a: a["output_tokens"])[:3]:
        question = [{"role": "user", "content": answer["question"]}]
        output = llm.chat(question, SamplingParams(temperature=0, max_tokens=data["max_tokens"]))[0]
        found = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        assert found == (answer["prompt_tokens"], answer["output_tokens"])
