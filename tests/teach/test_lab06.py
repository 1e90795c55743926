"""Lab 6's grader: right answers pass; the mistakes people make fail with words that help."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from pagedvllm.teach.cases import lab06
from pagedvllm.teach.cases.lab06 import JOBS, Job
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Any, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = grade(task, answer, solution=True).passed
    return passed, capsys.readouterr().out


# ---------------------------------------------------------------- 6.1


class Numbers:
    """A right solution, with switches that spoil it."""

    ignores_head_dim = needs_kv_heads = counts_null = keys_only = two_bytes = rounds_up = below_zero = floats = False

    def __call__(self, config: dict[str, Any], available: int, block_size: int) -> tuple[int, int, int]:
        heads = config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"] if self.needs_kv_heads else config.get("num_key_value_heads") or heads
        head_dim = config["hidden_size"] / heads if self.floats else config["hidden_size"] // heads
        if not self.ignores_head_dim:
            head_dim = config.get("head_dim") or head_dim
        dtype = config.get("torch_dtype") or config["dtype"]
        size = 2 if self.two_bytes else {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
        per_token = (1 if self.keys_only else 2) * config["num_hidden_layers"] * kv_heads * head_dim * size
        page = per_token * block_size
        blocks = -(-available // page) if self.rounds_up else available // page
        usable = blocks - (not self.counts_null)
        return per_token, blocks, (usable if self.below_zero else max(0, usable)) * block_size


def test_right_numbers_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("6.1", Numbers(), capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("ignores_head_dim", "whose heads are 128 wide: input"),
        ("needs_kv_heads", "raised KeyError: 'num_key_value_heads'"),
        ("counts_null", "tokens: expected 46576, got 46592"),
        ("keys_only", "bytes per token: expected 23040, got 11520"),
        ("two_bytes", "one KV head for all, fp32: input"),
        ("rounds_up", "blocks: expected 2912, got 2913"),
        ("below_zero", "less than a block: input"),
        ("floats", "bytes per token must be an integer, got 23040.0"),
    ],
)
def test_wrong_numbers_fail(mistake: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("6.1", type("Wrong", (Numbers,), {mistake: True})(), capsys)
    assert not passed and words in said


def test_numbers_of_another_form(capsys: pytest.CaptureFixture[str]) -> None:
    passed, said = outcome("6.1", lambda *_: 23040, capsys)
    assert not passed and "expected three numbers, got 23040" in said


# ---------------------------------------------------------------- 6.2


class Size:
    """A right solution, with switches that spoil it."""

    seats, tokens, share, null, last = 0, 2048, 0.95, 1, 1

    def __call__(self, job: Job) -> dict[str, Any]:
        cards = 1
        while True:
            users = -(-job.users // cards)
            settings = {
                "max_num_seqs": self.seats or users,
                "max_num_batched_tokens": self.tokens,
                "max_model_len": job.prompt + job.answer,
                "gpu_memory_utilization": self.share,
            }
            plan = lab06.plan_of(job, settings)
            needed = users * -(-(job.prompt + job.answer - self.last) // 16)
            if needed <= plan.num_blocks - self.null or cards == 12:
                return {"cards": cards, **settings}
            cards += 1


def test_the_right_size_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("6.2", Size(), capsys)[0]


@pytest.mark.parametrize(
    ("mistake", "name", "words"),
    [
        ({"null": 0}, "to the last block", "1 card of 2856 blocks: 1 preemptions"),
        ({"last": 0}, "a team", "1 card can do it (each may have 2861 blocks), you pay for 2"),
        ({"seats": 256}, "a team", "1 card can do it"),
        ({"share": 0.8}, "a department", "3 cards can do it"),
        ({"share": 0.96}, "a team", "gpu_memory_utilization 0.96 is more than the house allows, 0.95"),
        ({"tokens": 1024}, "a team", "max_num_batched_tokens 1024 is less than the house's 2048"),
    ],
)
def test_a_wrong_size_fails(mistake: dict[str, Any], name: str, words: str) -> None:
    wrong = type("Wrong", (Size,), mistake)()
    assert words in lab06.check_size(wrong(JOBS[name]), JOBS[name])


def test_too_few_cards_are_seen_in_the_replay() -> None:
    """Nobody computes it for the reader: the scheduler itself runs out of blocks, or of seats."""
    job = JOBS["a department"]
    right = {"cards": 3, **lab06.tightest(job, 3)}
    assert lab06.check_size(right, job) == ""
    assert "preemptions, and up to" in lab06.check_size({**right, "cards": 2, "max_num_seqs": 75}, job)
    assert "max_num_seqs is 49, but 50 users share" in lab06.check_size({**right, "max_num_seqs": 49}, job)
    assert "3 cards can do it (each may have" in lab06.check_size({**right, "cards": 4}, job)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("to the last block", {"cards": 1, "max_num_seqs": 1}, "max_num_seqs is 1, but 2 users share the busiest card"),
        ("long documents", {"max_num_seqs": 2}, "max_num_seqs is 2, but 3 users share the busiest card"),
        ("long documents", {"gpu_memory_utilization": 0.7}, "0 preemptions, and up to 1 requests wait"),
        ("to the last block", {"cards": 1, "gpu_memory_utilization": 0.94}, "0 preemptions, and up to 1 requests wait"),
    ],
)
def test_who_waits_until_the_first_has_ended_is_seen(name: str, change: dict[str, Any], words: str) -> None:
    """The first ends before all had a chance to start: their prompts are that long."""
    job = JOBS[name]
    cards = change.get("cards", 1)
    assert words in lab06.check_size({"cards": cards, **lab06.tightest(job, cards), **change}, job)


@pytest.mark.parametrize("name", JOBS)
def test_one_card_less_never_does(name: str) -> None:
    job, fewest = JOBS[name], lab06.fewest_cards(JOBS[name])
    assert lab06.check_size({"cards": fewest, **lab06.tightest(job, fewest)}, job) == ""
    if fewest > 1:
        less = {"cards": fewest - 1, **lab06.tightest(job, fewest - 1)}
        assert "preemptions, and up to" in lab06.check_size(less, job)


def test_sizes_of_another_form() -> None:
    job = JOBS["a team"]
    right = {"cards": 1, **lab06.tightest(job, 1)}
    assert "expected a dict with the keys cards, " in lab06.check_size(3, job)
    assert "cards must be a whole number from 1 on, got 0" in lab06.check_size({**right, "cards": 0}, job)
    for share in ("0.9", None, 0, float("nan")):
        said = lab06.check_size({**right, "gpu_memory_utilization": share}, job)
        assert said == f"gpu_memory_utilization must be a number above 0, got {share!r}"
    assert "longer than max_model_len 1000" in lab06.check_size({**right, "max_model_len": 1000}, job)
    refused = {**right, "gpu_memory_utilization": 0.7}
    assert "does not start: one request of max_model_len does not fit" in lab06.check_size(refused, job)


def test_the_jobs_sit_on_their_edges() -> None:
    """What each job is there for: the null block, the token that is never stored."""
    job = JOBS["to the last block"]
    assert lab06.plan_of(job, lab06.tightest(job, 1)).num_blocks == lab06.blocks_needed(job, 1)
    job = JOBS["a team"]
    one_more = Job(**{**asdict(job), "answer": job.answer + 1})
    assert (lab06.fewest_cards(job), lab06.fewest_cards(one_more)) == (1, 2)
    assert lab06.fewest_cards(JOBS["a department"]) == lab06.fewest_cards(JOBS["large model, few users"]) == 3


# ---------------------------------------------------------------- 6.3

RIGHT: dict[str, dict[str, Any]] = {
    "A": {"gpu_memory_utilization": 0.75},
    "B": {"max_model_len": 4768},
    "C": {"dtype": "bfloat16"},
    "D": {"max_num_seqs": 12},
    "E": {"kv_cache_memory_bytes": None},
    "F": {"gpu_memory_utilization": 0.92},
}


def test_mended_starts_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("6.3", RIGHT, capsys)[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("B", {"max_model_len": 4000}),
        ("B", {"max_model_len": None}),
        ("E", {"kv_cache_memory_bytes": 60_000_000}),
        ("F", {"gpu_memory_utilization": None}),
    ],
)
def test_there_are_several_right_answers(name: str, change: dict[str, Any]) -> None:
    assert lab06.check_mended({**RIGHT, name: change}, name) == ""


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("A", {"gpu_memory_utilization": 0.8}, "it is still refused: gpu_memory_utilization 0.8 asks for"),
        ("A", {"gpu_memory_utilization": 0.4}, "still refused: no memory is left"),
        ("B", {"max_num_seqs": 2}, "still refused: max_model_len 8000 does not fit"),
        ("B", {"max_model_len": 500}, "it starts, but a request of 4000 tokens is longer than max_model_len"),
        ("B", {"max_model_len": 3999}, "it starts, but a request of 4000 tokens is longer than max_model_len"),
        ("E", {"gpu_memory_utilization": None}, "still refused: kv_cache_memory_bytes 200000000 asks for"),
        ("C", {"dtype": "float"}, "still refused: dtype must be one of"),
        ("D", {"max_num_seqs": 8}, "only 8 can run at a time"),
        ("E", {"kv_cache_memory_bytes": 20_000_000}, "it starts, but stores only 6480 tokens"),
        ("F", {"kv_cache_memory_bytes": 100_000_000}, "still refused: gpu_memory_utilization is for GPUs"),
        ("F", {"device": "cpu"}, "device is not yours to change"),
        ("F", {"block_sise": 8}, "still refused: unknown setting 'block_sise'"),
        ("F", {"block_size": 8, "dtype": "float32"}, "expected {"),
    ],
)
def test_a_start_that_is_not_mended(name: str, change: dict[str, Any], words: str) -> None:
    assert words in lab06.check_mended({**RIGHT, name: change}, name)


def test_mended_of_another_form() -> None:
    assert 'expected {"A": {setting: value}} with one setting, got None' in lab06.check_mended("0.75", "A")


def test_the_refusals_are_the_ones_the_text_speaks_of() -> None:
    starts = {
        "A": "gpu_memory_utilization 0.92 asks for",
        "B": "max_model_len 8000 does not fit",
        "C": "the weights of 2-layers need",
        "D": "the largest step does not fit",
        "E": "kv_cache_memory_bytes 200000000 asks for",
        "F": "gpu_memory_utilization is for GPUs",
    }
    for name, words in starts.items():
        assert lab06.SITUATIONS[name].refusal().startswith(words)


def test_stubs_are_not_attempted(capsys: pytest.CaptureFixture[str]) -> None:
    def stub(*_: Any) -> None:
        raise NotImplementedError("your code")

    for task, answer in (("6.1", stub), ("6.2", stub), ("6.3", None)):
        assert not grade(task, answer).attempted
        assert "not attempted" in capsys.readouterr().out
