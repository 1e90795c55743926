"""The figures of the chapters, one function each: data in, one picture out. How they look is decided in style.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedvllm.teach.style import COLORS, figure, show

if TYPE_CHECKING:
    import torch

    from pagedvllm.tokenizer import Tokenizer


def distributions(
    logits: torch.Tensor, tokenizer: Tokenizer, temperatures: Sequence[float], top_p: float, num_tokens: int = 8
) -> None:
    """What the likeliest tokens get at several temperatures; pale: what top-p cuts off. logits: [1, vocab]."""
    fig, axes = figure(6.4, 3.2, columns=len(temperatures), sharex=True, sharey=True)
    names = tokenizer.tokens(logits[0].topk(num_tokens).indices.tolist())
    for axis, temperature, color in zip(axes, temperatures, COLORS, strict=False):
        probs, _ = (logits[0] / temperature).softmax(-1).sort(descending=True)
        before = probs.cumsum(0) - probs
        for i, (p, mass) in enumerate(zip(probs[:num_tokens].tolist(), before.tolist(), strict=False)):
            axis.barh(i, p, color=color, alpha=1.0 if mass < top_p or i == 0 else 0.3)
        axis.set_title(f"temperature {temperature}")
        axis.set_yticks(range(num_tokens), [repr(name)[1:-1] for name in names])
        axis.set_xlabel("probability")
    axes[0].invert_yaxis()
    shown = ", ".join(map(str, temperatures))
    show(fig, alt=f"Probabilities of the {num_tokens} likeliest tokens at temperature {shown}. Pale: cut by top-p.")


def latency_bars(recompute: Sequence[float], cached: Sequence[float]) -> None:
    """Milliseconds of each step: the staircase of recomputing against one tall prefill and a flat decode."""
    fig, (left, right) = figure(6.4, 2.8, columns=2, sharey=True)
    steps = range(1, len(recompute) + 1)
    left.bar(steps, recompute, color=COLORS[1])
    left.set_title("recompute everything")
    right.bar(steps[:1], cached[:1], color=COLORS[1])
    right.bar(steps[1:], cached[1:], color=COLORS[0])
    right.set_title("keep K and V")
    right.annotate("prefill", (1.6, cached[0]), va="top")
    middle = len(cached) // 2 + 1
    right.annotate("decode", (middle, max(cached[1:])), xytext=(0, 6), textcoords="offset points", ha="center")
    for axis in (left, right):
        axis.set_xlabel("output token")
        axis.set_xticks([s for s in steps if s == 1 or s % 4 == 0])
    left.set_ylabel("ms")
    show(
        fig, alt=f"Left: {len(recompute)} bars that climb. Right: one tall bar, then {len(cached) - 1} low, equal ones."
    )
