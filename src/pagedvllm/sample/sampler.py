"""From logits to the next token, for a batch whose rows each have their own parameters.

The order is vLLM's (v1/sample/sampler.py, Sampler): processors and mask, temperature, min-p,
top-k and top-p, then a draw.
Papers: Fan et al., 2018 (top-k); Holtzman et al., 2020 (top-p); Nguyen et al., 2024 (min-p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pagedvllm.sampling_params import SamplingParams


@dataclass
class SamplingBatch:
    """What the sampler knows about the R rows it samples, in order.

    generators: one a row, so that no row's draw depends on its neighbours.
    histories: prompt and output ids of each row; num_prompt_tokens: where output begins in
        them; eos_token_ids: what ends each row. For logits processors.
    """

    params: Sequence[SamplingParams]
    generators: Sequence[torch.Generator]
    histories: Sequence[Sequence[int]] = field(default_factory=list)
    num_prompt_tokens: Sequence[int] = field(default_factory=list)
    eos_token_ids: Sequence[tuple[int, ...]] = field(default_factory=list)


class LogitsProcessor(Protocol):
    """Changes logits before sampling: penalties, biases (vLLM: v1/sample/logits_processor/)."""

    def apply(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """[R, vocab] -> [R, vocab]."""
        ...


class Sampler:
    """Chooses one token a row."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.processors = processors

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, batch: SamplingBatch, mask: Tensor | None = None
    ) -> list[int]:
        """R token ids from logits [R, vocab]; mask: [R, vocab], False forbids a token."""
        for processor in self.processors:
            logits = processor.apply(logits, batch)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        tokens = logits.argmax(-1)
        random = [row for row, params in enumerate(batch.params) if not params.greedy]
        if random:
            probs = filtered_probs(logits[random], [batch.params[row] for row in random])
            tokens[random] = draw(probs, [batch.generators[row] for row in random])
        return tokens.tolist()


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each row is drawn from: temperature, min-p, top-k, top-p. [R, vocab], both."""

    def column(name: str) -> Tensor:
        values = [getattr(p, name) for p in params]
        return torch.tensor(values, device=logits.device).unsqueeze(1)

    logits = logits / column("temperature")
    probs = logits.softmax(-1)
    too_rare = probs < column("min_p") * probs.amax(-1, keepdim=True)
    logits = logits.masked_fill(too_rare, float("-inf"))
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = column("top_k")
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), float("-inf"))
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # what all likelier tokens have together
    top_p = column("top_p")
    cut = (before >= top_p) & (top_p < 1) & (rank > 0)  # 1 keeps all, rounding or not
    probs = probs.masked_fill(cut, 0.0)
    return torch.zeros_like(probs).scatter(1, order, probs / probs.sum(-1, keepdim=True))


def draw(probs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One token a row, [R]: who waits the shortest exponential time, with rates `probs`."""
    noise = torch.empty_like(probs)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    return (probs / noise.clamp_min(1e-38)).argmax(-1)
