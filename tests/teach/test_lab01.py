"""Lab 1's grader: right answers of every kind pass, the mistakes people make fail with words that help."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from pagedvllm.model.config import DecoderConfig
from pagedvllm.reference import CachedSequence
from pagedvllm.teach.cases import lab01
from pagedvllm.teach.labs import grade


def outcome(task: str, answer: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    result = grade(task, answer, solution=True)
    return result.passed, "\n".join([capsys.readouterr().out, *result.failures])  # it prints only the first failures


# ---------------------------------------------------------------- 1.1


def decode(
    model: Any, prompt: list[int], max_tokens: int, eos: Any, *, least: int = 1, extra: int = 0, keep_eos: bool = True
) -> list[int]:
    """A right solution, with switches that spoil it."""
    sequence = CachedSequence(model, len(prompt) + max_tokens + extra)
    output = [int(sequence.forward(prompt).argmax())]
    while (output[-1] not in eos or len(output) < least) and len(output) < max_tokens + extra:
        output.append(int(sequence.forward(output[-1:]).argmax()))
    return output if keep_eos or output[-1] not in eos else output[:-1]


def recompute(model: Any, prompt: list[int], max_tokens: int, eos: Any) -> list[int]:
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in eos):
        output.append(int(CachedSequence(model, 128).forward(prompt + output).argmax()))
    return output


def feeds_the_last(model: Any, prompt: list[int], max_tokens: int, eos: Any) -> list[int]:
    sequence, output = CachedSequence(model, 128), []
    logits = sequence.forward(prompt)
    while len(output) < max_tokens and not (output and output[-1] in eos):
        output.append(int(logits.argmax()))
        logits = sequence.forward(output[-1:])
    return output


def feeds_all_again(model: Any, prompt: list[int], max_tokens: int, eos: Any) -> list[int]:
    sequence, output = CachedSequence(model, 128), []
    while len(output) < max_tokens and not (output and output[-1] in eos):
        output.append(int(sequence.forward(prompt + output).argmax()))
    return output


def test_decode_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("1.1", decode, capsys)[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (recompute, "Every step fed the whole sequence again"),
        (feeds_the_last, "Nobody needs the logits after the last token"),
        (feeds_all_again, "expected ["),
        (lambda *args: args[1] + decode(*args), "the prompt is not part of the answer"),
        (lambda *args: decode(*args, keep_eos=False), "the end token is part of the answer"),
        (lambda *args: decode(*args, least=99), "it should have stopped"),
        (lambda *args: decode(*args, extra=1), "it should have stopped"),
        (lambda *args: decode(args[0], args[1], args[2] - 1, args[3]), "expected ["),
        (lambda *args: [torch.tensor([t]) for t in decode(*args)], "got [tensor("),
        (lambda *args: 7, "got 7"),
        (lambda model, prompt, max_tokens, eos: CachedSequence(model, 1).forward(prompt), "raised IndexError"),
    ],
)
def test_decode_wrong(answer: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("1.1", answer, capsys)
    assert not passed
    assert message in printed


@pytest.mark.parametrize("prompt", [lab01.SHORT, [5], lab01.LONG])
def test_the_tiny_model_is_sure(prompt: list[int]) -> None:
    """Its two best tokens are far apart at each step: every machine picks the same."""
    sequence, new = CachedSequence(lab01.TinyModel(), 128), prompt
    for token in lab01.reference(prompt, 20):
        best, second = sequence.forward(new)[0].topk(2).values.tolist()
        assert best - second > 0.01
        new = [token]


# ---------------------------------------------------------------- 1.2


def kv_bytes(config: dict[str, Any], num_tokens: int, size: int) -> int:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * size * num_tokens)


def test_kv_bytes_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome("1.2", kv_bytes, capsys)[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda c, n, b: kv_bytes(c, n, b) // 2, "SmolLM2-135M, one token in fp32"),
        (lambda c, n, b: kv_bytes({**c, "num_key_value_heads": None}, n, b), "Llama-3.1-70B"),
        (lambda c, n, b: kv_bytes({**c, "head_dim": None}, n, b), "its config states head_dim"),
        (lambda c, n, b: kv_bytes({"num_key_value_heads": c["num_key_value_heads"], **c}, n, b), "raised KeyError"),
        (lambda c, n, b: kv_bytes(c, 1, b), "no tokens"),
        (lambda c, n, b: kv_bytes(c, n, 2), "1,000 tokens in fp8"),
        (lambda c, n, b: kv_bytes(c, n, b) / 2**10, "expected 46080, got 45.0"),
        (lambda c, n, b: float(kv_bytes(c, n, b)), "46080.0 is the right number, but not an integer: divide with //"),
    ],
)
def test_kv_bytes_wrong(answer: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("1.2", answer, capsys)
    assert not passed
    assert message in printed


@pytest.mark.parametrize("name", lab01.CONFIGS)
def test_kv_bytes_agree_with_the_engine(name: str) -> None:
    config = lab01.CONFIGS[name]
    assert kv_bytes(config, 1, 2) == DecoderConfig.from_dict(config).kv_bytes_per_token(2)


# ---------------------------------------------------------------- 1.3


def top_p(
    probs: torch.Tensor, p: float, *, including: bool = False, scale: bool = True, guard: bool = True
) -> torch.Tensor:
    values, order = probs.sort(descending=True)
    drop = values.cumsum(0) > p if including else values.cumsum(0) - values >= p
    values = values.masked_fill(drop & (p < 1 or not guard), 0.0)
    return torch.zeros_like(probs).scatter(0, order, values / values.sum() if scale else values)


def from_the_back(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Right, with other ties: drop the least likely tokens as long as enough is left."""
    if p == 1:
        return probs.clone()
    kept = probs.double()
    for token in reversed(probs.argsort(descending=True, stable=True).tolist()):
        if kept.sum() - kept[token] >= p - 1e-9:
            kept[token] = 0.0
    return (kept / kept.sum()).float()


def in_place(probs: torch.Tensor, p: float) -> torch.Tensor:
    result = top_p(probs, p)
    return probs.copy_(result)


@pytest.mark.parametrize("answer", [top_p, from_the_back, lambda probs, p: top_p(probs.flip(0), p).flip(0)])
def test_top_p_right(answer: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("1.3", answer, capsys)
    assert passed, printed


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda probs, p: top_p(probs, p, including=True), "no token is left"),
        (lambda probs, p: top_p(probs, p, including=True), "less than p = 0.7"),
        (lambda probs, p: top_p(probs, p, scale=False), "expected probabilities [0.6667, 0.3333"),
        (lambda probs, p: top_p(probs.sort(descending=True).values, p), "not sorted: "),
        (lambda probs, p: probs * (probs.cumsum(0) - probs < p), "dropped a token of probability"),
        (lambda probs, p: top_p(probs, min(1.0, p + 0.1)), "reaches p = 0.75"),
        (lambda probs, p: probs.clone(), "keeps 4 tokens"),
        (lambda probs, p: top_p(probs, p, guard=False), "49,152 random tokens, p = 1 keeps all: "),
        (lambda probs, p: top_p(probs, p, guard=False), "reaches 1 too early. Cut only if p < 1"),
        (lambda probs, p: torch.zeros_like(probs), "no token is left"),
        (in_place, "the input was changed"),
        (lambda probs, p: top_p(probs, p)[:2], "expected a tensor of shape [4]"),
        (lambda probs, p: top_p(probs, p).tolist(), "expected a tensor of shape [4]"),
    ],
)
def test_top_p_wrong(answer: Callable[..., Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed, printed = outcome("1.3", answer, capsys)
    assert not passed
    assert message in printed


def test_the_running_sum_of_a_large_vocabulary_reaches_1_early() -> None:
    """The case catches a solution that does not look at p: a large part of the tokens would go, not a few."""
    probs = lab01.random_probs(3, 49_152, 4.0)
    assert probs.min() > 0
    assert (top_p(probs, 1.0, guard=False) == 0).sum() > 1000
    assert (top_p(probs, 1.0) > 0).all()


@pytest.mark.parametrize(("seed", "p"), [(0, 0.3), (1, 0.8), (2, 0.95)])
def test_random_rows_have_a_clear_border(seed: int, p: float) -> None:
    """No sum of likely tokens is so near to p that rounding decides."""
    sums = lab01.random_probs(seed).double().sort(descending=True).values.cumsum(0)
    assert (sums - p).abs().min() > 1e-4
    assert any(a < p <= b for a, b in pairwise(sums.tolist()))
