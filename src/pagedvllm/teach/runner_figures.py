"""The pictures of chapter 7.1 and its lab: a flat batch, rows that stay, the host's time, a kernel's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from pagedvllm.teach.style import BLUE, GRID, INK, ORANGE, PURPLE, RED, SKY, figure, show

if TYPE_CHECKING:
    from pagedvllm.batch import FlatBatch
    from pagedvllm.teach.runners import Rows

OWNERS = (SKY, ORANGE, "#7CCBB2", PURPLE, "#B9B9B0", "#E6A98A")  # dark text can be read on each of them


def flat_batch(batch: FlatBatch, tables: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """A step's arrays, cell by cell, coloured by request: one number for each token, then for each request.

    tables: [S, longest], padded. names: of the S requests; what stands before a colon is the short one.
    """
    num_tokens, starts = batch.num_tokens, batch.query_start_loc
    owner = [i for i in range(len(names)) for _ in range(starts[i + 1] - starts[i])]
    fig, axis = figure(6.4, 3.5)
    rows = {"token_ids": batch.token_ids, "positions": batch.positions, "slot_mapping": batch.slot_mapping}
    for y, (title, values) in enumerate(rows.items()):
        axis.text(-0.15, y + 0.5, title, ha="right", va="center")
        for x, value in enumerate(values):
            _cell(axis, x, y, value, OWNERS[owner[x]])
    for i, name in enumerate(names):
        middle = (starts[i] + starts[i + 1]) / 2
        axis.text(middle, -0.2, name.partition(":")[0], ha="center", va="bottom", fontweight="bold")
    for border in starts:
        axis.plot([border, border], [-0.05, 3.45], color=INK, linewidth=1.2)
        axis.text(border, 3.8, str(border), ha="center", va="center")
    axis.text(-0.45, 3.8, "query_start_loc", ha="right", va="center")
    axis.text(-0.45, 4.75, "logits_at", ha="right", va="center")
    for x in batch.sample_rows:
        axis.annotate(
            str(x),
            (x + 0.5, 3.05),
            (x + 0.5, 4.75),
            ha="center",
            va="center",
            color=RED,
            arrowprops={"arrowstyle": "->", "color": RED},
        )
    _per_request(axis, batch, tables, names, top=5.9)
    axis.set(xlim=(-3.0, num_tokens + 0.3), ylim=(6.2 + len(names), -0.75))
    axis.axis("off")
    said = "; ".join(f"{title} {values}" for title, values in rows.items())
    per = f"seq_lens {batch.seq_lens}, block_tables {[list(table) for table in tables]}"
    more = f"query_start_loc {starts}; logits_at {batch.sample_rows}; {per}"
    show(fig, alt=f"A step of {num_tokens} tokens of {len(names)} requests ({', '.join(names)}): {said}; {more}.")


def _per_request(
    axis: Any, batch: FlatBatch, tables: Sequence[Sequence[int]], names: Sequence[str], top: float
) -> None:
    """The two arrays with a row for each request, under those with a column for each token."""
    left = 4
    axis.text(1.5, top - 0.2, "seq_lens", ha="center", va="bottom")
    axis.text(left + len(tables[0]) / 2, top - 0.2, "block_tables", ha="center", va="bottom")
    for i, (name, length, table) in enumerate(zip(names, batch.seq_lens, tables, strict=True)):
        axis.text(-0.15, top + i + 0.5, name, ha="right", va="center")
        _cell(axis, 1, top + i, length, OWNERS[i])
        for x, block in enumerate(table):
            _cell(axis, left + x, top + i, block, OWNERS[i] if block else GRID)


def _cell(axis: Any, x: float, y: float, value: int | str, color: str) -> None:
    axis.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, facecolor=color, edgecolor="none"))
    axis.text(x + 0.5, y + 0.53, str(value), ha="center", va="center", color=INK)


def rows_over_steps(steps: Mapping[str, Rows], columns: int = 2) -> None:
    """The persistent batch after each of several steps. Pale: it was there already; strong: written in this step.

    Left of a gap the tokens, right of it the block ids of each row. A grey cell was written with nothing.
    """
    first = next(iter(steps.values()))
    num_rows, longest = first.tokens_written.shape
    width = first.blocks_written.shape[1]
    panels = -(-len(steps) // columns)
    fig, axes = figure(7.0, panels * (0.36 + 0.235 * num_rows), rows=panels, columns=columns, squeeze=False)
    order = sorted({name for rows in steps.values() for name in rows.names})
    for axis, (title, rows) in zip(axes.flat, steps.items(), strict=False):
        for r in range(num_rows):
            name = rows.names[r] if r < len(rows.names) else ""
            color = OWNERS[order.index(name) % len(OWNERS)] if name else GRID
            axis.text(-0.3, r + 0.5, name, ha="right", va="center")
            for t in range(longest):
                filled = bool(name) and t < rows.num_tokens[r]
                _written(axis, t, r, "", color if filled else GRID, bool(rows.tokens_written[r, t]), filled)
            table = rows.tables[r] if name else []
            for i in range(width):
                filled, label = i < len(table), str(table[i]) if i < len(table) else ""
                fill = color if filled else GRID
                _written(axis, longest + 0.8 + i, r, label, fill, bool(rows.blocks_written[r, i]), filled)
        axis.set_title(f"{title}: {rows.num_written} written", loc="left")
        axis.set(xlim=(-1.1, longest + width + 0.8), ylim=(num_rows, 0))
        axis.axis("off")
    for axis in axes.flat[len(steps) :]:
        axis.axis("off")
    said = "; ".join(
        f"{title}: rows {', '.join(rows.names) or 'none'}, {rows.num_written} numbers written"
        for title, rows in steps.items()
    )
    show(fig, alt=f"The rows of the persistent batch after each step. {said}.")


def _written(axis: Any, x: float, y: float, label: str, color: str, written: bool, filled: bool) -> None:
    """One number of the batch."""
    pale = tuple(0.62 + 0.38 * part for part in to_rgb(color))
    face = color if written and filled else "#B5B5AE" if written else pale
    edge = INK if written else "none"
    axis.add_patch(Rectangle((x + 0.06, y + 0.08), 0.88, 0.84, facecolor=face, edgecolor=edge, linewidth=0.9))
    if label:
        axis.text(x + 0.5, y + 0.53, label, ha="center", va="center", fontsize=8, color=INK)


def host_time(
    by_requests: Mapping[int, Mapping[str, float]],
    by_context: Mapping[int, Mapping[str, float]],
    fixed: tuple[int, int],
) -> None:
    """Milliseconds of a decode step on the host: by the number of requests, and by the length of their contexts.

    fixed: the context of the left curves, the number of requests of the right ones.
    """
    fig, (left, right) = figure(6.4, 2.9, columns=2, sharey=True)
    for axis, curves in ((left, by_requests), (right, by_context)):
        x = list(curves)
        for name, color, marker in zip(curves[x[0]], (ORANGE, BLUE), "os", strict=False):
            axis.plot(x, [times[name] for times in curves.values()], marker=marker, color=color, label=name)
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(x, [f"{n:,}" for n in x])
        axis.minorticks_off()
    left.set(title=f"contexts of {fixed[0]:,} tokens", xlabel="running requests", ylabel="ms on the host, each step")
    right.set(title=f"{fixed[1]} requests", xlabel="tokens in each context")
    left.legend()
    said = []
    for what, curves in (("requests", by_requests), ("tokens of context", by_context)):
        n = max(curves)
        said.append(f"at {n} {what} " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in curves[n].items()))
    show(fig, alt=f"Time on the host for a decode step without its model: {'; '.join(said)}.")


def touched(before: Sequence[float], after: Sequence[float], writer: Mapping[int, int], block_size: int) -> None:
    """A cache, place by place, after a kernel ran: which token wrote where, and what was left alone.

    before, after: one number for each slot. writer: slot -> the token that should have written it.
    """
    num_blocks = len(after) // block_size
    fig, axis = figure(1.2 + 0.62 * block_size, 0.5 + 0.36 * num_blocks)
    wrong = []
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        block, place = divmod(slot, block_size)
        expected = slot in writer
        if (old != new) != expected:
            wrong.append(slot)
        color = RED if slot in wrong else SKY if expected else GRID
        label = f"t{writer[slot]}" if expected else "!" if slot in wrong else ""
        _cell(axis, place, block, label, color)
    axis.set(xlim=(0, block_size), ylim=(num_blocks, 0), xticks=[])
    axis.set_yticks([block + 0.5 for block in range(num_blocks)], [f"block {b}" for b in range(num_blocks)])
    axis.grid(False)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    said = ", ".join(f"token {t} in slot {slot}" for slot, t in sorted(writer.items(), key=lambda item: item[1]))
    show(fig, alt=f"The slots of the cache that the kernel wrote: {said}. Wrong: {wrong or 'none'}.")
