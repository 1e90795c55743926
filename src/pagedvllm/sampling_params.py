"""What a request asks for: how to choose tokens, when to stop, what to report.

vLLM: sampling_params.py, SamplingParams; names and defaults are the same. Fields of later
chapters are here from the
start: an engine that cannot do what a field asks refuses the request by the field's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# What the simplest engine can do. Later chapters add to it.
BASIC_FIELDS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids"}
    | {"ignore_eos", "detokenize", "skip_special_tokens"}
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Raises:
        ValueError, TypeError: a field is out of range or of the wrong type; the message
            names it.
    """

    # Choosing a token: chapter 1.
    temperature: float = 1.0  # 0: the most likely token, always (greedy)
    top_k: int = 0  # keep the k most likely tokens; 0 or -1: all
    top_p: float = (
        1.0  # keep the smallest set of likely tokens whose probabilities sum to top_p
    )
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    seed: int | None = None  # of this request alone; None: the engine's
    # When to stop: chapter 1; stop strings and min_tokens: chapter 5.
    max_tokens: int | None = 16  # of output; None: up to the model's longest sequence
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    # What comes back: text in chapter 1, several samples in chapter 5; log-probabilities,
    # changed logits in chapter 8.
    detokenize: bool = True
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    structured_outputs: Mapping[str, Any] | None = None  # chapter 9.3

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _number("min_p", self.min_p, 0, 1)
        _integer("seed", self.seed, 0, 2**63 - 1, optional=True)
        _integer("max_tokens", self.max_tokens, 1, optional=True)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        _integer("n", self.n, 1, 16384)  # as vLLM's VLLM_MAX_N_SEQUENCES
        if self.n > 1 and self.greedy:
            raise ValueError(
                f"n must be 1 with temperature 0, where all samples are alike; got {self.n}"
            )
        _integer("logprobs", self.logprobs, 0, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, open_low=True)
        self._check_lists()
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )

    def _check_lists(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise TypeError(
                f"stop must be a string or a list of strings, got {self.stop!r}"
            )
        if "" in stops:
            raise ValueError("stop must not hold an empty string: every text contains it")
        ids = self.stop_token_ids if self.stop_token_ids is not None else []
        if not isinstance(ids, list) or not all(_is_integer(i) for i in ids):
            raise TypeError(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}"
            )
        if any(i < 0 for i in ids):
            raise ValueError(f"stop_token_ids must be at least 0, got {min(ids)}")
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise TypeError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
            )
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, Mapping
        ):
            raise TypeError(
                f"structured_outputs must be a mapping, got {self.structured_outputs!r}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # as vLLM: dividing by less would overflow

    def refuse_unsupported(self, supported: frozenset[str], engine: str) -> None:
        """Raise ValueError, naming the field, if a field that the engine does not support
        was set.
        """
        for f in fields(self):
            if f.name not in supported and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{f.name} is not supported by engine {engine!r}: leave it at {f.default!r}"
                )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(
    name: str, value: int | None, low: int, high: float = math.inf, optional: bool = False
) -> None:
    if value is None and optional:
        return
    if not _is_integer(value):
        raise TypeError(
            f"{name} must be an integer{' or None' if optional else ''}, got {value!r}"
        )
    _number(name, value, low, high)


def _number(
    name: str, value: Any, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if (
        not (low < value if open_low else low <= value)
        or not value <= high
        or math.isinf(value)
    ):
        lower = (
            "finite, " * math.isinf(value)
            + ("above" if open_low else "at least")
            + f" {low}"
        )
        raise ValueError(
            f"{name} must be {lower}{'' if high == math.inf else f' and at most {high}'}, got {value}"
        )
