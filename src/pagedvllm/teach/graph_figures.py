"""The pictures of chapter 7.3: what a launch costs against what a kernel takes, and what padding wastes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedvllm.teach.style import BLUE, GREEN, INK, ORANGE, figure, show

Spans = Sequence[tuple[float, float]]  # start, length


def timelines(steps: Mapping[str, tuple[Spans, Spans]]) -> None:
    """For each step a row of what the host does and one of what the device does. All in microseconds."""
    fig, axis = figure(6.4, 1.0 + 0.8 * len(steps))
    ticks, end = [], 0.0
    for i, (name, (host, device)) in enumerate(steps.items()):
        y = 2.6 * i
        axis.broken_barh(
            [(start, 0.9 * long) for start, long in host], (y, 0.9), color=ORANGE, label="_" if i else "host"
        )
        axis.broken_barh(list(device), (y + 1, 0.9), color=BLUE, edgecolor="white", label="_" if i else "device")
        last = sum(device[-1])
        axis.text(last, y + 1.45, f" {last:.0f} µs", va="center", ha="left", color=INK)
        ticks.append((y + 0.95, name))
        end = max(end, last)
    axis.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axis.grid(False)
    axis.invert_yaxis()
    axis.set(xlabel="µs", xlim=(0, 1.14 * end))
    fig.legend(loc="outside upper center", ncols=2, handlelength=1)
    said = "; ".join(f"{name}: done after {sum(device[-1]):.0f} µs" for name, (_, device) in steps.items())
    show(fig, alt=f"Host and device over time, eight kernels each. {said}.")


def launches_against_memory(models: Mapping[str, tuple[float, float]]) -> None:
    """For each model milliseconds of launches, and of reading its weights."""
    fig, axis = figure(6.4, 0.9 + 0.55 * len(models))
    names = list(models)
    for shift, color, label, part in ((-0.2, ORANGE, "launches", 0), (0.2, GREEN, "reading the weights", 1)):
        values = [models[name][part] for name in names]
        axis.barh([i + shift for i in range(len(names))], values, height=0.38, color=color, label=label)
        for i, value in enumerate(values):
            axis.text(value, i + shift, f" {value:.2f}", va="center", color=INK)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlabel="ms a step", xlim=(0, 1.15 * max(map(max, models.values()))))
    fig.legend(loc="outside upper center", ncols=2, handlelength=1)
    said = "; ".join(f"{name}: launches {a:.2f}, weights {b:.2f}" for name, (a, b) in models.items())
    show(fig, alt=f"Milliseconds of a decode step at batch 1. {said}.")


def padding(shares: Mapping[str, Sequence[float]]) -> None:
    """For each list of sizes: the share of rows, in percent, that nobody waits for, for 1, 2, 3, ... requests."""
    fig, axis = figure(6.4, 2.8)
    for (name, values), color, style in zip(shares.items(), (BLUE, ORANGE, GREEN), ("-", "--", ":"), strict=False):
        axis.step(range(1, len(values) + 1), values, where="mid", color=color, linestyle=style, label=name)
    axis.set(xlabel="requests in the step", ylabel="% of rows wasted", ylim=(0, 100))
    fig.legend(loc="outside upper center", ncols=len(shares))
    said = "; ".join(
        f"{name}: {sum(values) / len(values):.0f}% on average, {max(values):.0f}% at most"
        for name, values in shares.items()
    )
    show(fig, alt=f"Rows of padding for 1 to {len(next(iter(shares.values())))} requests. {said}.")
