"""The pictures of chapter 4 and its lab: maps of memory, where it goes, and how a block table leads to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from pagedvllm.teach.memory import STATES, Memory
from pagedvllm.teach.style import BLUE, COLORS, GRID, INK, ORANGE, PURPLE, RED, SKY, figure, show

STATE_COLORS = dict(zip(STATES, (BLUE, "#9CCBE8", ORANGE, RED), strict=True))
LABELLED = (SKY, ORANGE, PURPLE, "#7CCBB2")  # dark text can be read on them


def memory_map(panels: Mapping[str, Memory], num_blocks: int, block_size: int, follow: str, columns: int = 64) -> None:
    """The cache at one instant under several managers, a cell for each block, coloured by owner.

    Filled: as much of the block as holds tokens; pale: taken, and empty; white: free. follow: the request that is drawn
    in ink in every panel.
    """
    rows = -(-num_blocks // columns)
    names = sorted({name for memory in panels.values() for name in memory.tables}, key=_order)
    colors = {name: INK if name == follow else _color(i) for i, name in enumerate(names)}
    fig, axes = figure(6.4, len(panels) * (0.42 + 0.105 * rows), rows=len(panels), squeeze=False)
    for axis, (title, memory) in zip(axes[:, 0], panels.items(), strict=True):
        free = set(range(1, num_blocks + 1))
        for name, table in memory.tables.items():
            free -= set(table)
            left, color = memory.tokens[name], colors[name]
            parts = [(block, min(max(left - i * block_size, 0) / block_size, 1.0)) for i, block in enumerate(table)]
            _cells(axis, [(block, 1.0) for block, filled in parts if filled < 1], columns, color, alpha=0.28)
            _cells(axis, [part for part in parts if part[1]], columns, color)
        _cells(axis, [(block, 1.0) for block in free], columns, GRID)
        axis.set(xlim=(-0.2, columns), ylim=(rows, -0.2), xticks=[], yticks=[])
        axis.set_title(title, loc="left")
        for spine in axis.spines.values():
            spine.set_visible(False)
    shares = ", ".join(
        f"{title}: {len(memory.tables)} requests, {sum(memory.tokens.values()) / num_blocks / block_size:.0%} of the"
        " memory holds tokens"
        for title, memory in panels.items()
    )
    show(fig, alt=f"Maps of the same {num_blocks} blocks at the same step, coloured by owner. {shares}.")


def mapping(table: Sequence[int], tokens: int, block_size: int, num_blocks: int) -> None:
    """A request's tokens in a row, its block table, and where its blocks lie in the cache."""
    fig, axis = figure(6.4, 0.5 + 0.36 * num_blocks)
    top = (num_blocks - len(table)) / 2
    for i, block in enumerate(table):
        y, target = top + i, block - 1
        color = LABELLED[i % len(LABELLED)]
        for place in range(block_size):
            token = i * block_size + place
            for x, row in ((place, y), (place + block_size + 5.5, target)):
                _place(axis, x, row, str(token) if token < tokens else "", color if token < tokens else GRID)
        axis.text(block_size + 2.2, y + 0.52, f"{i}: block {block}", ha="center", va="center")
        arrow = {"arrowstyle": "->", "color": INK}
        axis.annotate("", (block_size + 1.1, y + 0.5), (block_size + 0.1, y + 0.5), arrowprops=arrow)
        axis.annotate("", (block_size + 4.7, target + 0.5), (block_size + 3.4, y + 0.5), arrowprops=arrow)
    for block in range(1, num_blocks + 1):
        axis.text(block_size + 5.3, block - 0.48, str(block), ha="right", va="center")
        for place in range(block_size):
            if block not in table:
                _place(axis, place + block_size + 5.5, block - 1, "", GRID)
    for x, title in (
        (block_size / 2, "tokens of the request"),
        (block_size + 2.2, "block table"),
        (1.5 * block_size + 5.5, "blocks of the cache"),
    ):
        axis.text(x, -0.35, title, ha="center", va="bottom")
    axis.set(xlim=(0, 2 * block_size + 5.5), ylim=(num_blocks, -1.1))
    axis.axis("off")
    said = "; ".join(f"logical block {i} is block {block}" for i, block in enumerate(table))
    show(fig, alt=f"{tokens} tokens in a row, in blocks of {block_size}. Through the block table: {said}.")


def _place(axis: Any, x: float, y: float, label: str, color: Any) -> None:
    """One place of a block, with what is in it."""
    axis.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, facecolor=color, edgecolor="none"))
    axis.text(x + 0.5, y + 0.52, label, ha="center", va="center", color=INK)


def block_picture(rows: Mapping[int, Sequence[str]]) -> None:
    """A few blocks with what is in each place ("a0" is token 0 of request a, "." is empty), coloured by request."""
    wide = max(map(len, rows.values()))
    fig, axis = figure(0.8 + 0.62 * wide, 0.5 + 0.34 * len(rows))
    owners = sorted({place[0] for places in rows.values() for place in places if place != "."})
    for y, places in enumerate(rows.values()):
        for x, place in enumerate(places):
            color = GRID if place == "." else LABELLED[owners.index(place[0]) % len(LABELLED)]
            _place(axis, x, y, place.strip("."), color)
    axis.set(xlim=(0, wide), ylim=(len(rows), 0), xticks=[])
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [f"block {block}" for block in rows])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    said = "; ".join(f"block {block}: {' '.join(places)}" for block, places in rows.items())
    show(fig, alt=f"The blocks and what they hold. {said}.")


def state_bars(states: Mapping[str, Mapping[str, float]]) -> None:
    """One horizontal bar for each manager: the shares of its memory in each of STATES."""
    fig, axis = figure(6.4, 0.9 + 0.42 * len(states))
    names = list(states)
    left = [0.0] * len(names)
    for state, color in STATE_COLORS.items():
        shares = [100 * states[name][state] for name in names]
        axis.barh(names, shares, left=left, color=color, label=state, height=0.66)
        for y, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 7:
                light = color in (BLUE, RED)
                axis.text(
                    start + share / 2, y, f"{share:.0f}", ha="center", va="center", color="white" if light else INK
                )
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.grid(False)
    axis.set(xlim=(0, 100), xlabel="% of the KV cache, while somebody waits")
    fig.legend(loc="outside upper center", ncols=len(STATES), handlelength=1, columnspacing=1.2)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{state} {share:.0%}" for state, share in row.items()) for name, row in states.items()
    )
    show(fig, alt=f"Where the memory goes. {said}.")


def _order(name: str) -> tuple[int, str]:
    """r2 before r10."""
    return len(name), name


def _color(number: int) -> tuple[float, ...]:
    """The palette, then the palette again half as dark."""
    base = to_rgb(COLORS[number % len(COLORS)])
    return base if number // len(COLORS) % 2 == 0 else tuple(0.55 * c for c in base)


def _cells(axis: Any, parts: Sequence[tuple[int, float]], columns: int, color: Any, alpha: float = 1.0) -> None:
    """Draw (block, filled share) as one path, neighbours in one piece: a picture of 500 blocks stays small."""
    vertices: list[tuple[float, float]] = []
    codes: list[Any] = []
    for first, last, share in _pieces(sorted(parts), columns):
        y, x = divmod(first - 1, columns)
        right = x + last - first + 0.86 * share
        vertices += [(x, y), (right, y), (right, y + 0.84), (x, y + 0.84), (x, y)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    if vertices:
        axis.add_patch(PathPatch(Path(vertices, codes), facecolor=color, edgecolor="none", alpha=alpha))


def _pieces(parts: Iterable[tuple[int, float]], columns: int) -> list[tuple[int, int, float]]:
    """(first block, last block, filled share of the last) of stretches of full blocks in one row."""
    pieces: list[tuple[int, int, float]] = []
    for block, share in parts:
        if pieces and pieces[-1][1:] == (block - 1, 1.0) and (block - 1) % columns:
            pieces[-1] = (pieces[-1][0], block, share)
        else:
            pieces.append((block, block, share))
    return pieces
