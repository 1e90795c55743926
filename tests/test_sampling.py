"""Parameters refuse what they cannot mean; the sampler draws what they say, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedvllm import SamplingParams
from pagedvllm.sample.sampler import Sampler, SamplingBatch, draw, filtered_probs
from pagedvllm.sample.stopping import check_stop


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("temperature", -0.1, ValueError, "temperature must be at least 0, got -0.1"),
        ("temperature", float("nan"), ValueError, "temperature must be at least 0"),
        ("temperature", float("inf"), ValueError, "temperature must be finite, at least 0"),
        ("top_k", 2**70, ValueError, "top_k must be at least -1 and at most 2147483647"),
        ("stop_token_ids", [3, -3], ValueError, "stop_token_ids must be at least 0, got -3"),
        ("temperature", "hot", TypeError, "temperature must be a number, got 'hot'"),
        ("temperature", True, TypeError, "temperature must be a number"),
        ("top_k", -2, ValueError, "top_k must be at least -1 and at most 2147483647, got -2"),
        ("top_k", 1.5, TypeError, "top_k must be an integer"),
        ("top_p", 0, ValueError, "top_p must be above 0 and at most 1, got 0"),
        ("top_p", 1.1, ValueError, "top_p must be above 0 and at most 1, got 1.1"),
        ("min_p", 2, ValueError, "min_p must be at least 0 and at most 1, got 2"),
        ("seed", -1, ValueError, "seed must be at least 0"),
        ("max_tokens", 0, ValueError, "max_tokens must be at least 1, got 0"),
        ("max_tokens", 2.0, TypeError, "max_tokens must be an integer or None"),
        ("min_tokens", 17, ValueError, r"min_tokens must be at most max_tokens \(16\), got 17"),
        ("stop", [1], TypeError, "stop must be a string or a list of strings"),
        ("stop", "", ValueError, "stop must not hold an empty string"),
        ("stop_token_ids", ["a"], TypeError, "stop_token_ids must be a list of token ids"),
        ("n", 0, ValueError, "n must be at least 1"),
        ("presence_penalty", 3, ValueError, "presence_penalty must be at least -2 and at most 2"),
        ("repetition_penalty", 0, ValueError, "repetition_penalty must be above 0"),
        ("ignore_eos", 1, TypeError, "ignore_eos must be True or False"),
        ("logit_bias", [1], TypeError, "logit_bias must map"),
    ],
)
def test_each_field_names_itself_and_its_limit(field: str, value: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**{field: value})


def test_misspelt_parameter() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=4)


def batch(*params: SamplingParams, seed: int = 0) -> SamplingBatch:
    return SamplingBatch(
        params, [torch.Generator().manual_seed(p.seed if p.seed is not None else seed) for p in params]
    )


def test_temperature_zero_is_the_exact_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0 - 1e-6, -5.0]])
    for temperature in (0, 0.0, 1e-6):
        assert Sampler()(logits, batch(SamplingParams(temperature=temperature))) == [1]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(-1, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_filters_equal_their_definition(logits, temperature, top_k, top_p, min_p) -> None:
    """Against the definition, token by token in float64 and plain Python."""
    got = filtered_probs(
        torch.tensor([logits]), [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)]
    )[0]
    scaled = [x / temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    if any(abs(w - min_p) < 1e-5 for w in weights[:] if w != 1):
        return  # on the edge, fp32 and float64 may differ
    order = sorted(range(len(logits)), key=lambda i: -scaled[i])
    kept = [i for i in order if weights[i] >= min_p][: top_k if top_k > 0 else None]
    total, mass, chosen = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if chosen and mass >= top_p:
            break
        if abs(mass - top_p) < 1e-5:
            return
        chosen.append(i)
        mass += weights[i] / total
    want = torch.zeros(len(logits), dtype=torch.float64)
    for i in chosen:
        want[i] = weights[i] / sum(weights[j] for j in chosen)
    if len({round(scaled[i], 5) for i in order}) == len(
        order
    ):  # equal logits: which of them stays is a matter of order
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert got.sum() == pytest.approx(1, abs=1e-5)


def test_top_p_of_one_keeps_every_token() -> None:
    """The running sum of 49,152 fp32 probabilities reaches 1 before its end."""
    logits = torch.randn(2, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    assert (filtered_probs(logits, [SamplingParams(), SamplingParams(min_p=0.0)]) > 0).all()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws: 5 cells, 4 degrees of freedom; 18.5 is exceeded once in a thousand times."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    generator, count = torch.Generator().manual_seed(0), 20_000
    tokens = torch.cat([draw(probs.expand(1000, 5), [generator] * 1000) for _ in range(count // 1000)])
    seen = torch.bincount(tokens, minlength=5)
    assert ((seen - count * probs) ** 2 / (count * probs)).sum() < 18.5


def test_impossible_tokens_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(500, 3)
    assert set(draw(probs, [torch.Generator().manual_seed(1)] * 500).tolist()) == {1}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    params = [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.5, top_p=0.7, seed=2),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.02, seed=3),
    ]
    together = Sampler()(logits, batch(*params))
    alone = [Sampler()(logits[i : i + 1], batch(p))[0] for i, p in enumerate(params)]
    backwards = Sampler()(logits.flip(0), batch(*reversed(params)))
    assert together == alone == backwards[::-1]
    assert together[1] == logits[1].argmax()


def test_mask_and_processors_come_first() -> None:
    class Ban:
        def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            return logits.index_fill(1, torch.tensor(batch.histories[0]), float("-inf"))

    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    mask = torch.tensor([[True, True, False, True]])
    rows = SamplingBatch([SamplingParams(temperature=0)], [torch.Generator()], histories=[[0, 1]])
    assert Sampler([Ban()])(logits, rows, mask) == [3]


def test_stop_checks_in_order() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[5, 2])

    def check(*output: int, params: SamplingParams = params, max_len: int = 100) -> tuple:
        return check_stop([9] * 6, output, params, (2,), max_len)

    assert check(7, 7, 2) == ("stop", None)  # the end of sequence comes first
    assert check(7, 7, 5) == ("stop", 5)
    assert check(7, 7, 7) == ("length", None)
    assert check(7, 7, max_len=8) == ("length", None)
    assert check(7, 7, max_len=9) == (None, None)
    assert check(2, params=SamplingParams(max_tokens=3, ignore_eos=True)) == (None, None)
