"""The pictures of chapter 6 and its lab: parts of a card's memory, a start over its stages, what each setting does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedvllm.teach.style import BLUE, GREEN, GRID, INK, ORANGE, PURPLE, RED, SKY, figure, show

GIB = 2**30
PARTS = {
    "weights": BLUE,
    "activations": ORANGE,
    "other": PURPLE,
    "KV cache": GREEN,
    "not used": GRID,
}  # of a card, from the left; each in bytes


def memory_bars(cards: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each card, all of the same length, cut into PARTS."""
    fig, axis = figure(6.4, 0.95 + 0.46 * len(cards))
    names = list(cards)
    left = [0.0] * len(names)
    for part, color in PARTS.items():
        shares = [100 * cards[name].get(part, 0) / sum(cards[name].values()) for name in names]
        if not any(shares):
            continue
        axis.barh(names, shares, left=left, color=color, label=part, height=0.68)
        for y, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 7:
                gib = f"{cards[names[y]][part] / GIB:.3g}"
                axis.text(start + share / 2, y, gib, ha="center", va="center", color="white" if color == BLUE else INK)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlim=(0, 100), xlabel="% of the card; numbers in GiB")
    fig.legend(loc="outside upper center", ncols=len(PARTS), handlelength=1, columnspacing=1.2)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{part} {size / GIB:.3g}" for part, size in parts.items())
        for name, parts in cards.items()
    )
    show(fig, alt=f"Where a card's memory goes, in GiB. {said}.")


def start(stages: Mapping[str, tuple[float, float]], requested: float, total: float) -> None:
    """Memory over the stages of a start: after each, and at its worst moment. All in bytes."""
    fig, axis = figure(6.4, 3.0)
    names = list(stages)
    for x, (after, peak) in enumerate(stages.values()):
        axis.bar(x, after / GIB, color=BLUE, width=0.62, label="" if x else "when the stage is over")
        if peak > after:
            axis.bar(x, (peak - after) / GIB, bottom=after / GIB, color=ORANGE, width=0.62, label="_")
    axis.bar(0, 0, color=ORANGE, label="for a moment")
    for level, name, color, side in ((total, "the card", INK, "bottom"), (requested, "may be used", RED, "top")):
        axis.axhline(level / GIB, color=color, linewidth=1.2, linestyle="--")
        axis.text(-0.45, level / GIB, name, ha="left", va=side, color=color)
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="GiB", xlim=(-0.5, len(names) - 0.5), ylim=(0, 1.12 * total / GIB))
    fig.legend(loc="outside upper center", ncols=2, handlelength=1)
    said = "; ".join(f"{name}: {a / GIB:.2f}, at most {p / GIB:.2f}" for name, (a, p) in stages.items())
    show(fig, alt=f"GiB of tensors over a start on a card of {total / GIB:.2f}. {said}.")


def shares(seconds: Mapping[str, float]) -> None:
    """One bar: which share of the time each stage takes."""
    fig, axis = figure(6.4, 1.35)
    whole, left = sum(seconds.values()), 0.0
    for (name, value), color in zip(seconds.items(), (SKY, BLUE, ORANGE, GREEN), strict=False):
        share = 100 * value / whole
        axis.barh([""], share, left=left, color=color, label=f"{name} {share:.0f}%", height=0.6)
        left += share
    axis.grid(False)
    axis.set(xlim=(0, 100), xlabel="% of the start", yticks=[])
    fig.legend(loc="outside upper center", ncols=2, handlelength=1)
    said = ", ".join(f"{name} {value / whole:.0%}" for name, value in seconds.items())
    show(fig, alt=f"Shares of the time of a start: {said}.")


Curve = tuple[Sequence[float], Sequence[float]]


def panels(curves: Mapping[str, Curve], ylabel: str, logs: Sequence[str] = ()) -> None:
    """A small curve for each setting: what `ylabel` becomes when it alone is turned. logs: with a logarithmic axis."""
    rows = -(-len(curves) // 2)
    fig, axes = figure(6.4, 0.3 + 2.0 * rows, rows=rows, columns=2, sharey=True, squeeze=False)
    highest = max(max(y) for _, y in curves.values())
    for axis, (name, (x, y)) in zip(axes.flat, curves.items(), strict=False):
        axis.plot(x, y, marker="o", markersize=3.5, color=BLUE)
        axis.set(xlabel=name, ylim=(0, 1.08 * highest))
        if name in logs:
            _log2(axis, x)
    for axis in axes[:, 0]:
        axis.set_ylabel(ylabel)
    said = "; ".join(
        f"{name} from {x[0]:g} to {x[-1]:g}: from {y[0]:.4g} to {y[-1]:.4g}" for name, (x, y) in curves.items()
    )
    show(fig, alt=f"{ylabel}, one setting at a time. {said}.")


def beside(x: Sequence[float], series: Mapping[str, Sequence[float]], xlabel: str) -> None:
    """Curves over one x, each in its own panel with its own scale: ylabel -> y."""
    fig, axes = figure(6.4, 2.4, columns=len(series), squeeze=False)
    for axis, (ylabel, y), color in zip(axes[0], series.items(), (BLUE, RED, ORANGE), strict=False):
        axis.plot(x, y, marker="o", markersize=3.5, color=color)
        axis.set_title(ylabel, loc="left")
        axis.set_ylim(0, 1.08 * max(y))
    fig.supxlabel(xlabel, fontsize=9)
    said = "; ".join(f"{ylabel} from {y[0]:g} to {y[-1]:g}" for ylabel, y in series.items())
    show(fig, alt=f"As {xlabel} rises from {x[0]:g} to {x[-1]:g}: {said}.")


def _log2(axis: Any, x: Sequence[float]) -> None:
    """Ticks at every second value, written as they are."""
    axis.set_xscale("log", base=2)
    ticks = list(x)[:: 2 if len(x) > 5 else 1]
    axis.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
