"""The figures of chapter 2 and its lab: who sits where, padding, throughput, the roofline, what a token reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from pagedvllm.teach.style import BLUE, GREEN, INK, ORANGE, PANEL, PURPLE, RED, SKY, figure, show

if TYPE_CHECKING:
    from pagedvllm.request import Request
    from pagedvllm.roofline import Machine, StepCost

Steps = Sequence[Sequence["Request | None"]]
T = TypeVar("T")
OWNERS = (BLUE, SKY, GREEN, PURPLE)  # in turn; red is kept for what is wasted


def runs(values: Iterable[T]) -> list[tuple[T, int, int]]:
    """Stretches of equal values: (value, where it begins, how long it is)."""
    found: list[tuple[T, int, int]] = []
    at = 0
    for value, group in groupby(values):
        length = sum(1 for _ in group)
        found.append((value, at, length))
        at += length
    return found


def seats(charts: Mapping[str, Steps], alt: str) -> None:
    """Seats x steps, one panel for each entry, all on one time axis. Idle cells are red.

    A colour for as many requests as there are seats, in order of admission: the first batch, the second, ...
    """
    num_seats = len(next(iter(charts.values()))[0])
    admitted = dict.fromkeys(r.request_id for steps in charts.values() for step in steps for r in step if r is not None)
    wave = {name: i // num_seats % len(OWNERS) for i, name in enumerate(admitted)}
    fig, axes = figure(
        6.4, 0.75 + len(charts) * (0.55 + 0.16 * num_seats), rows=len(charts), sharex=True, squeeze=False
    )
    for axis, (title, steps) in zip(axes[:, 0], charts.items(), strict=True):
        for row, seat in enumerate(zip(*steps, strict=True)):
            for request, start, length in runs(seat):
                color = RED if request is None else OWNERS[wave[request.request_id]]
                axis.broken_barh([(start, length)], (row - 0.42, 0.84), facecolor=color, edgecolor=PANEL, linewidth=0.8)
        idle = sum(seat is None for step in steps for seat in step)
        axis.set_title(f"{title}: {len(steps)} steps, {idle / (len(steps) * num_seats):.0%} of the cells idle")
        axis.set(ylabel="seat", yticks=[0, num_seats - 1], yticklabels=[1, num_seats])
        axis.grid(False)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("step")
    show(fig, alt)


def padding(lengths: Sequence[int], alt: str) -> None:
    """Prompts as a left-padded rectangle (padding red), and as one flat row."""
    fig, (upper, lower) = figure(6.4, 2.3, rows=2, sharex=True, height_ratios=[len(lengths), 1])
    widest, total, at = max(lengths), sum(lengths), 0
    look: dict[str, Any] = {"edgecolor": PANEL, "linewidth": 0.8}
    for row, length in enumerate(lengths):
        color = OWNERS[row % len(OWNERS)]
        cells = [RED] * (widest - length) + [color] * length
        upper.broken_barh([(x, 1) for x in range(widest)], (row - 0.45, 0.9), facecolors=cells, **look)
        lower.broken_barh([(x, 1) for x in range(at, at + length)], (-0.45, 0.9), facecolors=color, **look)
        at += length
    rectangle = f"{len(lengths)} x {widest} = {len(lengths) * widest} rows"
    upper.set_title(f"padded on the left: {rectangle}, {len(lengths) * widest - total} of them padding")
    lower.set_title(f"flat: {total} rows")
    lower.set(yticks=[], xticks=[sum(lengths[:i]) for i in range(len(lengths) + 1)], xlabel="query_start_loc")
    upper.set(yticks=[], xlim=(0, total))
    upper.invert_yaxis()
    for axis in (upper, lower):
        axis.grid(False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    show(fig, alt)


def throughput(seconds: Mapping[int, float]) -> None:
    """Decode steps of several batch sizes: how long one takes, and how many tokens a second come out."""
    fig, (left, right) = figure(6.4, 2.8, columns=2)
    sizes, rates = list(seconds), [size / s for size, s in seconds.items()]
    left.plot(sizes, [1000 * s for s in seconds.values()], marker="o", color=ORANGE)
    left.set(title="time of one decode step", ylabel="ms", xlabel="requests in the batch")
    right.plot(sizes, rates, marker="o", color=BLUE)
    right.plot(sizes, [rates[0] * size for size in sizes], ":", lw=1.2, color=INK, label="if steps were all alike")
    right.set(title="tokens of all requests", ylabel="tokens/s", xlabel="requests in the batch")
    right.set_ylim(0, 1.5 * max(rates))
    right.legend(loc="lower right")
    left.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xticks([sizes[0], *(size for size in sizes if size >= sizes[-1] / 4)])
    alt = f"Left: a decode step of {sizes[-1]} requests takes longer than one of 1, but not {sizes[-1]} times as long."
    show(fig, f"{alt} Right: tokens per second climb with the batch, less and less steeply.")


def roofline(machine: Machine, steps: Mapping[str, tuple[StepCost, float]]) -> None:
    """The two ceilings of a machine, and what steps reached under them: label -> (cost, measured seconds)."""
    fig, axis = figure(6.4, 3.4)
    intensities = [cost.intensity for cost, _ in steps.values()]
    low, high = min(intensities) / 2, max(machine.knee, *intensities) * 3
    roof = [low * machine.bytes_per_second / 1e9, machine.flops_per_second / 1e9]
    axis.plot([low, machine.knee, high], [roof[0], roof[1], roof[1]], color=INK)
    axis.plot([machine.knee] * 2, [roof[0], roof[1]], ":", lw=1.2, color=INK)
    for name, (cost, seconds) in steps.items():
        at = cost.intensity, cost.flops / seconds / 1e9
        axis.plot(*at, "o", color=BLUE)
        axis.annotate(name, at, xytext=(5, -9), textcoords="offset points")
    near: dict[str, Any] = {"textcoords": "offset points"}
    slope = f"memory: {machine.bytes_per_second / 1e9:.0f} GB/s"
    axis.annotate(slope, ((low * machine.knee) ** 0.5, (roof[0] * roof[1]) ** 0.5), xytext=(-8, 6), ha="right", **near)
    axis.annotate(f"arithmetic: {roof[1]:.0f} Gflop/s", (high, roof[1]), xytext=(0, 5), ha="right", **near)
    axis.annotate(f"knee: {machine.knee:.1f}", (machine.knee, roof[0]), xytext=(5, 0), **near)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Gflop/s")
    axis.set_ylim(top=roof[1] * 1.8)
    show(fig, "A slope that ends in a flat roof. Measured steps lie below it, and move up it as the batch grows.")


def bytes_per_token(costs: Mapping[int, StepCost], alt: str) -> None:
    """What a step reads for each of its tokens, by batch size: its share of the weights, and its own cache."""
    fig, axis = figure(6.4, 3.0)
    sizes = list(costs)
    weights = [cost.weight_bytes / size / 1e9 for size, cost in costs.items()]
    cache = [cost.kv_bytes / size / 1e9 for size, cost in costs.items()]
    axis.plot(sizes, [w + c for w, c in zip(weights, cache, strict=True)], color=INK, lw=1.2, label="all it reads")
    axis.plot(sizes, weights, "o", color=BLUE, label="its share of the weights")
    axis.plot(sizes, cache, "s", color=ORANGE, label="its own keys and values")
    axis.set(xscale="log", yscale="log", xlabel="requests in the batch", ylabel="GB for each token")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.legend()
    show(fig, alt)
