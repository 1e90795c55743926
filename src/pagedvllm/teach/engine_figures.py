"""The figures of chapter 5 and its lab: who calls whom, where a step's time goes, the states of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedvllm.teach.layers import LANES, Call, lane_shares, own_stretches
from pagedvllm.teach.style import BLUE, GREEN, GRID, INK, ORANGE, PANEL, PURPLE, RED, SKY, figure, show

if TYPE_CHECKING:
    from pagedvllm.request import RequestStatus

COLORS = dict(zip(LANES, (GREEN, ORANGE, BLUE, SKY, "#7A7A74", PURPLE, RED), strict=True))
FAINT = "#8A8A84"  # grey text and lines: 3.3:1 on the panel
ROW = 0.31  # inches


def call_chart(call: Call, alt: str) -> None:
    """One call and all below it as a sequence diagram: a column for each layer, time goes down, not to scale."""
    events = _events(call)
    lanes = [lane for lane in LANES if lane in {c.lane for _, c in call.walk()}]
    x = {lane: i for i, lane in enumerate(lanes)}
    fig, axis = figure(7.2, 0.8 + ROW * len(list(call.walk())))
    rows = _rows(events)
    for lane in lanes:
        axis.axvline(x[lane], color=GRID, linewidth=1, zorder=0)
    for _, c in call.walk():
        top, bottom = rows[c, "begins"], rows[c, "ends"]
        axis.add_patch(_box(x[c.lane] - 0.05, top, 0.1, bottom - top, COLORS[c.lane]))
        parent = next((p for _, p in call.walk() if c in p.inside), None)
        if parent is not None and parent.lane != c.lane:
            arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
            step = 0.05 if x[c.lane] > x[parent.lane] else -0.05
            axis.annotate("", (x[c.lane] - step, top), (x[parent.lane] + step, top), arrowprops=arrow)
        axis.annotate(c.name.split(".")[-1], (x[c.lane] + 0.09, top), va="center", fontsize=8.5, zorder=4,
                      bbox={"boxstyle": "square,pad=0.1", "facecolor": PANEL, "edgecolor": "none"})  # fmt: skip
    axis.set_xticks(range(len(lanes)), lanes)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set(yticks=[], xlim=(-0.35, len(lanes) - 0.2))
    axis.set_ylim(max(rows.values()) + 0.4, -0.7)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    show(fig, alt)


def _events(call: Call) -> list[tuple[Call, str]]:
    """The beginning and the end of each call, in order."""
    inner = [event for c in call.inside for event in _events(c)]
    return [(call, "begins"), *inner, (call, "ends")]


def _rows(events: Sequence[tuple[Call, str]]) -> dict[tuple[Call, str], float]:
    """A row of its own for each beginning; an end comes half a row after the event before it."""
    rows: dict[tuple[Call, str], float] = {}
    at = -1.0
    for event in events:
        begins = event[1] == "begins"
        at = float(int(at) + 1) if begins else at + 0.3 if at == int(at) else at + 0.06
        rows[event] = at
    return rows


def _box(left: float, top: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, facecolor=color, edgecolor=PANEL, linewidth=0.5, zorder=3)


def swimlane(call: Call, title: str) -> None:
    """One call in real time: a lane for each layer, solid where that layer itself is at work."""
    shares = lane_shares([call])
    lanes = [lane for lane in LANES if shares[lane] > 0]
    fig, axis = figure(7.2, 0.9 + 0.34 * len(lanes))
    span = 1000 * call.seconds
    for _, c in call.walk():
        y = lanes.index(c.lane)
        for start, stop in own_stretches(c):
            bar = (1000 * (start - call.start), max(1000 * (stop - start), span / 500))
            axis.broken_barh([bar], (y - 0.35, 0.7), facecolor=COLORS[c.lane])
    for y, lane in enumerate(lanes):
        words = f"{shares[lane] * span:.2f} ms, {shares[lane]:.1%}"
        axis.annotate(words, (span, y), (8, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set(xlabel="ms", title=title, xlim=(0, span))
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")
    said = ", ".join(f"{lane} {shares[lane]:.1%}" for lane in lanes)
    show(fig, f"{title}: which layer was at work when. Shares of the time: {said}.")


def shares(charts: Mapping[str, Mapping[str, float]], title: str = "") -> None:
    """Horizontal bars of 100%: label -> (lane -> share)."""
    fig, axis = figure(7.2, 1.1 + 0.42 * len(charts))
    for y, lanes in enumerate(charts.values()):
        left = 0.0
        for lane in LANES:
            width = 100 * lanes.get(lane, 0.0)
            axis.barh(y, width, left=left, color=COLORS[lane], height=0.66, label=lane if y == 0 else None)
            left += width
    axis.set_yticks(range(len(charts)), list(charts))
    axis.invert_yaxis()
    axis.set(xlabel="% of the time", xlim=(0, 100), title=title)
    axis.grid(False)
    fig.legend(loc="outside lower center", ncols=len(LANES), columnspacing=1.0, handlelength=1.0, handletextpad=0.4)
    said = "; ".join(
        f"{label}: " + ", ".join(f"{lane} {share:.1%}" for lane, share in lanes.items() if share)
        for label, lanes in charts.items()
    )
    show(fig, f"{title or 'Shares of the time'}. {said}.")


PLACES = {
    "WAITING": (0.0, 0.0),
    "RUNNING": (2.1, 0.0),
    "PREEMPTED": (2.1, -1.35),
    "WAITING_FOR_STREAMING_REQ": (2.1, 1.35),
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": (0.0, 1.35),
    "WAITING_FOR_REMOTE_KVS": (0.0, -1.35),
}
ENDS = 4.35  # where the ends stand
GAP = 0.68  # half-way between two rows of PLACES


def states(transitions: Mapping[RequestStatus, frozenset[RequestStatus]], seen: Mapping[tuple[str, str], int]) -> None:
    """The table of legal transitions as a picture. Those that were seen are drawn strong, with how often.

    Raises:
        ValueError: something was seen that the table does not allow, or the table has a state without a place.
    """
    arrows = {(old.name, new.name) for old, others in transitions.items() for new in others}
    ends = [state.name for state in transitions if state.finished]
    if missing := {s.name for s in transitions} - set(PLACES) - set(ends) | set(seen) - arrows:
        raise ValueError(f"{sorted(map(str, missing))} is not in the picture")
    fig, axis = figure(7.2, 3.7)
    heights = {name: 1.25 - 0.5 * i for i, name in enumerate(ends)}
    reached = {name for pair in seen for name in pair}
    for name, (x, y) in PLACES.items():
        words = name.replace("WAITING_FOR_", "WAITING_FOR_\n").replace("_OUTPUT", "_\nOUTPUT")
        _state(axis, (x, y), words, SKY if name in reached else PANEL)
    for name in ends:
        place = (ENDS, heights[name])
        _state(axis, place, name.removeprefix("FINISHED_"), "#CFE8D8" if name in reached else PANEL)
    axis.annotate("FINISHED_...", (ENDS, 1.72), ha="center", va="center", color=INK)
    for old, new in sorted(arrows):
        if new in PLACES:
            bend = 0.16 if (new, old) in arrows else 0.0  # a pair of opposite arrows is bent apart
            _arrow(axis, PLACES[old], PLACES[new], seen.get((old, new), 0), bend)
        elif seen.get((old, new)):
            _arrow(axis, PLACES[old], (ENDS - 0.15, heights[new]), seen[old, new], _around(old, heights[new]), 0.58)
    axis.annotate("from every state on the left a request can also end", (ENDS, -1.72), ha="right", color=FAINT)
    axis.set(xlim=(-0.85, 5.25), ylim=(-1.9, 1.95), xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    said = ", ".join(f"{old} to {new} {count} times" for (old, new), count in sorted(seen.items()))
    show(fig, f"The twelve states of a request and the legal changes between them. Seen so far: {said or 'none'}.")


def _state(axis: Any, place: tuple[float, float], words: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": color, "edgecolor": INK, "linewidth": 0.8}
    axis.annotate(words, place, ha="center", va="center", fontsize=8, bbox=box, zorder=4)


def _around(old: str, height: float) -> float:
    """The bend with which an arrow to an end passes between the boxes of the middle column."""
    x, y = PLACES[old]
    middle = (y + height) / 2
    return -0.4 * ((GAP if middle > 0 else -GAP) - middle) if x == 0 else 0.0


def _arrow(
    axis: Any, start: tuple[float, float], end: tuple[float, float], count: int, bend: float, label_at: float = 0.5
) -> None:
    """From state to state, with `count` beside it unless it is 0. bend > 0: to the right of its way."""
    strong = {"color": BLUE, "linewidth": 1.8} if count else {"color": FAINT, "linewidth": 0.8}
    shape = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 26, "shrinkB": 28}
    axis.annotate("", end, start, arrowprops=shape | strong, zorder=2 if count else 1)
    if count:
        (x0, y0), (x1, y1) = start, end
        bow = 2 * label_at * (1 - label_at) * bend
        off = bow + math.copysign(0.1 / ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, bend)  # a little beside it
        x, y = x0 + label_at * (x1 - x0) + off * (y1 - y0), y0 + label_at * (y1 - y0) - off * (x1 - x0)
        box = {"boxstyle": "circle,pad=0.12", "facecolor": PANEL, "edgecolor": "none"}
        axis.annotate(str(count), (x, y), ha="center", va="center", color=BLUE, zorder=5, bbox=box)


def life(rows: Sequence[tuple[str, int, str]]) -> None:
    """A request step by step as three layers see it: (state in the scheduler, blocks in memory, text of its caller)."""
    fig, (top, middle, bottom) = figure(7.2, 2.9, rows=3, sharex=True, height_ratios=[0.6, 1, 0.7])
    colors = {"RUNNING": SKY, "PREEMPTED": ORANGE, "WAITING": "#D9D9D2"}
    for step, (state, blocks, text) in enumerate(rows, 1):
        top.barh(0, 0.94, left=step - 0.47, color=colors.get(state, "#CFE8D8"), height=0.8)
        words = state.removeprefix("FINISHED_").capitalize()
        top.annotate(words, (step, 0), ha="center", va="center", fontsize=8)
        middle.bar(step, blocks, width=0.8, color=BLUE)
        bottom.annotate(text.replace(" ", "\u2423"), (step, 0), ha="center", va="center", fontsize=8, rotation=20)
    top.set(yticks=[0], yticklabels=["scheduler"])
    middle.set(ylabel="blocks", yticks=range(max(blocks for _, blocks, _ in rows) + 1))
    bottom.set(yticks=[0], yticklabels=["caller"], xlabel="step", ylim=(-1, 1), xticks=range(1, len(rows) + 1))
    for axis in (top, bottom):
        axis.grid(False)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    said = "; ".join(f"step {n}: {s.lower()}, {b} blocks, {t!r}" for n, (s, b, t) in enumerate(rows, 1))
    show(fig, f"The life of a request as three layers see it. {said}.")
