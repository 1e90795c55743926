"""The pictures of chapter 7.2 and its lab: a program's way through a block table, kernels under a roofline, splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from pagedvllm.teach.style import BLUE, GRID, INK, ORANGE, PANEL, SKY, figure, show

PALE = "#CFE6F3"
LIGHT = (ORANGE, SKY, "#7CCBB2", "#DDA0C4")  # dark text can be read on them


def program_path(
    table: Sequence[int], length: int, block_size: int, num_blocks: int, keys: int, kv_head: int = 0
) -> None:
    """What one program of the attention kernel reads: its keys in tiles, through the table, at one KV head of two."""
    fig, axis = figure(7.4, 0.9 + 0.36 * num_blocks)
    top = (num_blocks - len(table)) / 2 - 0.2
    left, middle, right = 0.0, block_size + 1.3, block_size + 5.4
    for i, block in enumerate(table):
        y = top + i
        for place in range(block_size):
            token = i * block_size + place
            color = LIGHT[token // keys % len(LIGHT)] if token < length else GRID
            _box(axis, left + place, y, str(token) if token < length else "", color)
        _box(axis, middle, y, f"{block}", PANEL, 1.6)
        _arrow(axis, (left + block_size + 0.1, y + 0.5), (middle - 0.05, y + 0.5))
        _arrow(axis, (middle + 1.7, y + 0.5), (right - 0.75, block - 0.5))
    for block in range(1, num_blocks + 1):
        axis.text(right - 0.15, block - 0.48, str(block), ha="right", va="center")
        for place in range(block_size):
            for head in range(2):
                x = right + head * (block_size + 0.7) + place
                token = list(table).index(block) * block_size + place if block in table else length
                mine = token < length and head == kv_head
                _box(
                    axis, x, block - 1, str(token) if mine else "", LIGHT[token // keys % len(LIGHT)] if mine else GRID
                )
    for x, title in (
        (left + block_size / 2, f"keys 0 to {length - 1},\ntiles of {keys}"),
        (middle + 0.8, "block\ntable"),
        (right + block_size / 2, "cache,\nKV head 0"),
        (right + 1.5 * block_size + 0.7, "cache,\nKV head 1"),
    ):
        axis.text(x, -0.3, title, ha="center", va="bottom")
    axis.set(xlim=(left - 0.1, right + 2 * block_size + 0.8), ylim=(num_blocks + 0.1, -1.9))
    axis.axis("off")
    said = "; ".join(
        f"keys {i * block_size} to {min((i + 1) * block_size, length) - 1} in block {b}" for i, b in enumerate(table)
    )
    show(fig, f"The way of one program through the block table: {said}; of each, only KV head {kv_head} is read.")


def memory_touched(
    reads: Mapping[str, Sequence[tuple[int, int]]],
    rows: int,
    columns: int,
    row: str = "block ",
    column: str = "place in the block",
) -> None:
    """Which places of a matrix are touched by whom: name -> [(row, column)], a colour each; grey is never read."""
    fig, axis = figure(min(1.6 + 0.4 * columns, 6.4), 1.0 + min(0.34, 4 / rows) * rows)
    for y in range(rows):
        axis.broken_barh([(x + 0.03, 0.94) for x in range(columns)], (y + 0.06, 0.88), facecolor=GRID)
    for (name, places), color in zip(reads.items(), LIGHT, strict=False):
        for y, x in places:
            axis.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, facecolor=color))
        axis.plot([], [], "s", color=color, label=name, markersize=8)
    every = max(rows // 8, 1)
    axis.set(xlim=(0, columns), ylim=(rows, 0), xlabel=column)
    axis.set_xticks([x + 0.5 for x in range(0, columns, max(columns // 8, 1))], range(0, columns, max(columns // 8, 1)))
    axis.set_yticks([y + 0.5 for y in range(0, rows, every)], [f"{row}{y}" for y in range(0, rows, every)])
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(reads))
    said = "; ".join(f"{name} touches {_ranges(places)}" for name, places in reads.items())
    show(fig, f"Places that are touched: {said}.")


def _ranges(places: Sequence[tuple[int, int]]) -> str:
    """In words: "row 4, columns 0 to 3"."""
    rows = {y: [x for row, x in places if row == y] for y, _ in places}
    return ", ".join(f"row {y}, columns {min(xs)} to {max(xs)}" for y, xs in rows.items())


def roofline(points: Mapping[str, float], bytes_per_second: float, flops_per_second: float, name: str) -> None:
    """Kernels under the ceilings of a card: label -> operations per byte. The dots are bounds, not measured."""
    fig, axis = figure(6.4, 3.4)
    knee = flops_per_second / bytes_per_second
    low, high = min(points.values()) / 8, max(knee, *points.values()) * 4
    roof = [low * bytes_per_second / 1e12, flops_per_second / 1e12]
    axis.plot([low, knee, high], [roof[0], roof[1], roof[1]], color=INK)
    axis.plot([knee] * 2, [roof[0], roof[1]], ":", lw=1.2, color=INK)
    for label, intensity in points.items():
        at = intensity, min(intensity * bytes_per_second, flops_per_second) / 1e12
        axis.plot(*at, "o", color=BLUE)
        axis.annotate(label, at, xytext=(-8, 4), ha="right", textcoords="offset points")
    axis.annotate(f"knee: {knee:.0f}", (knee, roof[0]), xytext=(5, 0), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Tflop/s, at most", title=name)
    axis.set_ylim(top=roof[1] * 2)
    said = ", ".join(f"{label} {intensity:.2g}" for label, intensity in points.items())
    show(fig, f"The roofline of {name}, knee at {knee:.0f} operations per byte. Kernels on it: {said}.")


def filled(programs: Mapping[str, tuple[int, int]], room: int, alt: str) -> None:
    """Programs of a decode step without and with splits, beside those that fill a card: label -> (without, with)."""
    fig, axis = figure(6.4, 0.9 + 0.42 * len(programs))
    for y, (without, split) in enumerate(programs.values()):
        axis.barh(y, split, color=PALE, height=0.6, label="with splits" if not y else None)
        axis.barh(y, without, color=BLUE, height=0.6, label="without" if not y else None)
        label = f"{without} → {split}" if split != without else str(split)
        axis.text(split * 1.08, y, label, va="center", bbox={"facecolor": PANEL, "edgecolor": "none", "pad": 1})
    axis.axvline(room, color=INK, ls=":", lw=1.2, zorder=0.5)
    axis.set(xscale="log", xlabel=f"programs (dotted: {room} fill the card)")
    axis.set_xlim(right=max(room, *(split for _, split in programs.values())) * 6)
    axis.set_yticks(range(len(programs)), list(programs))
    axis.invert_yaxis()
    axis.grid(False)
    axis.legend(loc="lower right")
    show(fig, alt)


def _box(axis: Any, x: float, y: float, label: str, color: Any, wide: float = 1.0) -> None:
    edge = INK if color == PANEL else "none"
    axis.add_patch(Rectangle((x + 0.03, y + 0.06), wide - 0.06, 0.88, facecolor=color, edgecolor=edge, linewidth=0.8))
    axis.text(x + wide / 2, y + 0.52, label, ha="center", va="center", color=INK)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})
