"""Chapter 3's figures: what a scheduler did, drawn from its trace (the format of `pagedvllm replay`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pagedvllm.teach.style import BLUE, GREEN, INK, ORANGE, RED, SKY, figure, show

Line = Mapping[str, Any]
WAIT = "#D9D9D2"
WORDS = {
    "run": "goes on",
    "idle": "gets nothing",
    "admit": "is admitted",
    "preempt": "is preempted",
    "wait": "waits",
}


class Decision(NamedTuple):
    """What one schedule() call decided about one request.

    kind: run (it was running and goes on), idle (running, and gets no token), admit, preempt or wait.
    """

    name: str
    kind: str
    tokens: int = 0


def decisions(trace: Sequence[Line], step: int) -> list[Decision]:
    """All decisions of one step: the running requests in their order, then the waiting ones in theirs."""
    line = trace[step]
    before = trace[step - 1] if step else {}
    gone = {*before.get("finished", ()), *line["aborted"]}
    running = [name for name in before.get("running_queue", ()) if name not in gone]
    admitted = [name for name in line["scheduled"] if name in line["admitted_computed"]]
    lost, given = set(line["preempted"]), line["scheduled"]
    rows = [
        Decision(name, "preempt" if name in lost else "run" if name in given else "idle", given.get(name, 0))
        for name in running
    ]
    rows += [Decision(name, "admit", given[name]) for name in admitted]
    return rows + [Decision(name, "wait") for name in line["waiting_queue"] if name not in lost]


def step_flow(drawn: Sequence[tuple[Any, ...]], budget: int, title: str = "") -> None:
    """One schedule() call from top to bottom: who took how much of the token budget, and who got nothing."""
    rows = [Decision(*row) for row in drawn]
    said = [f"{WORDS[r.kind]}{f', {r.tokens} token' if r.tokens else ''}{'s' * (r.tokens > 1)}" for r in rows]
    fig, axis = figure(6.4, 0.9 + 0.36 * len(rows))
    spent = 0
    for y, row in enumerate(rows):
        axis.barh(y, row.tokens, left=spent, color=BLUE if row.tokens > 1 else SKY, height=0.62)
        spent += row.tokens
        style = {"va": "center", "color": RED if row.kind == "preempt" else INK}
        axis.annotate(said[y], (budget, y), (8, 0), textcoords="offset points", **style)
    axis.axvline(budget, color=INK, linestyle="--", linewidth=1)
    axis.set_xlim(0, budget * 1.6)
    axis.set_xticks(range(0, budget + 1, max(1, budget // 8)))
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.grid(False)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set(xlabel=f"token budget: {spent} of {budget} spent", title=title)
    outcome = "; ".join(f"{row.name} {words}" for row, words in zip(rows, said, strict=True))
    show(fig, alt=f"{title or 'One step'}: {outcome}. {spent} of {budget} tokens.")


def timeline(trace: Iterable[Line], budget: int, names: Sequence[str] = (), title: str = "") -> None:
    """Requests x steps, and below the tokens of each step: new ones, and ones computed before and lost.

    A number in a cell says how many tokens it computed; a cross marks a preemption.
    """
    lines = [line for line in trace if "scheduled" in line]
    while lines and not lines[-1]["scheduled"]:  # the last one only announces who has finished
        lines.pop()
    names = names or list(dict.fromkeys(name for line in lines for name in line["arrived"]))
    numbers = len(lines) <= 24
    fig, (top, bottom) = figure(
        6.4, 1.9 + 0.3 * len(names), rows=2, sharex=True, height_ratios=[max(len(names), 2) * 0.3, 0.9]
    )
    shares = [_paint(top, lines, name, y, numbers) for y, name in enumerate(names)]
    steps = [line["step"] for line in lines]
    again = [sum(share[i] for share in shares) for i in range(len(lines))]
    new = [line["total"] - lost for line, lost in zip(lines, again, strict=True)]
    bottom.bar(steps, new, width=0.9, color=BLUE, label="new")
    if any(again):
        bottom.bar(steps, again, width=0.9, bottom=new, color=ORANGE, label="again")
        bottom.legend(ncols=2, loc="upper right")
    bottom.axhline(budget, color=INK, linestyle="--", linewidth=1)
    bottom.set_ylim(0, budget * 1.5)
    bottom.set(xlabel="step", ylabel="tokens")
    top.set_yticks(range(len(names)), names)
    top.grid(False)
    top.invert_yaxis()
    top.set_title(title)
    crosses = sum(len(line["preempted"]) for line in lines)
    show(
        fig,
        alt=f"{title or 'Timeline'}: {len(names)} requests over {len(lines)} steps, {crosses} preemptions, "
        f"{sum(again)} of {sum(line['total'] for line in lines)} tokens computed again.",
    )


def _paint(axis: Any, lines: Sequence[Line], name: str, y: int, numbers: bool) -> list[int]:
    """One request's row. Returns for each step how many of its tokens were computed before."""
    computed = most = 0
    again = []
    for line in lines:
        step, tokens = line["step"], line["scheduled"].get(name, 0)
        if name in line["preempted"]:
            computed = 0
            axis.plot(step, y, marker="x", color=RED, markersize=7, markeredgewidth=2)
        if name in line["waiting_queue"] and name not in line["preempted"]:
            axis.barh(y, 0.9, left=step - 0.45, color=WAIT, height=0.7)
        lost = max(0, min(most, computed + tokens) - computed)
        again.append(lost)
        if tokens:
            axis.barh(y, 0.9, left=step - 0.45, color=ORANGE if lost else BLUE if tokens > 1 else SKY, height=0.7)
            if numbers:
                light = "white" if not lost and tokens > 1 else INK
                axis.annotate(str(tokens), (step, y), ha="center", va="center", color=light)
        computed += tokens
        most = max(most, computed)
    return again


def cliff(blocks: Sequence[int], speed: Sequence[float], preemptions: Sequence[int], stalls: Sequence[int]) -> None:
    """Against the size of the pool, which shrinks to the right: tokens per step, preemptions, the longest stall."""
    fig, axes = figure(6.4, 4.6, rows=3, sharex=True)
    series = (
        (speed, "tokens per step", BLUE),
        (preemptions, "preemptions", RED),
        (stalls, "longest stall, steps", ORANGE),
    )
    for axis, (values, label, color) in zip(axes, series, strict=True):
        axis.plot(blocks, values, marker="o", markersize=3, color=color)
        axis.set(ylabel=label)
        axis.set_ylim(bottom=0)
    fig.align_ylabels()
    axes[-1].set(xlabel="blocks in the pool")
    axes[-1].invert_xaxis()
    most, least = blocks.index(max(blocks)), blocks.index(min(blocks))
    show(
        fig,
        alt=f"From {max(blocks)} blocks down to {min(blocks)}: tokens per step fall from {speed[most]:.1f} to "
        f"{speed[least]:.1f}, preemptions rise from {preemptions[most]} to {preemptions[least]}, and the longest "
        f"stall rises from {stalls[most]} to {max(stalls)} steps.",
    )


def waits(results: Mapping[str, Mapping[str, float]], ylabel: str, title: str = "") -> None:
    """Groups of bars: policy -> (kind of request -> value)."""
    fig, axis = figure(6.4, 2.8)
    kinds = list(next(iter(results.values())))
    width = 0.8 / len(kinds)
    for j, (kind, color) in enumerate(zip(kinds, (SKY, BLUE, ORANGE, GREEN), strict=False)):
        places = [i + (j - (len(kinds) - 1) / 2) * width for i in range(len(results))]
        values = [row[kind] for row in results.values()]
        bars = axis.bar(places, values, width=width * 0.9, color=color, label=kind)
        axis.bar_label(bars, fmt="%.3g", padding=1)
    axis.set_xticks(range(len(results)), list(results))
    axis.margins(y=0.15)
    axis.set(ylabel=ylabel, title=title)
    axis.legend(ncols=len(kinds))
    said = "; ".join(f"{p}: " + ", ".join(f"{k} {v:.3g}" for k, v in row.items()) for p, row in results.items())
    show(fig, alt=f"{title or ylabel}. {said}.")


def lives(paths: Mapping[str, Sequence[str]]) -> None:
    """The way of each request through its states, one row each: name -> states in order."""
    longest = max(map(len, paths.values()))
    fig, axis = figure(6.8, 0.5 + 0.5 * len(paths))
    colors = {"WAITING": WAIT, "RUNNING": SKY, "PREEMPTED": ORANGE}
    for y, (_, states) in enumerate(paths.items()):
        for x, state in enumerate(states):
            label = state.removeprefix("FINISHED_").replace("_", " ").lower()
            box = {"boxstyle": "round,pad=0.35", "facecolor": colors.get(state, "#CFE8D8"), "edgecolor": INK}
            axis.annotate(label, (x, y), ha="center", va="center", fontsize=8, bbox=box)
            if x:
                axis.annotate("", (x - 0.36, y), (x - 0.64, y), arrowprops={"arrowstyle": "->", "color": INK})
    axis.set_yticks(range(len(paths)), list(paths))
    axis.set_xticks([])
    axis.set_xlim(-0.5, longest - 0.5)
    axis.set_ylim(len(paths) - 0.4, -0.6)
    axis.grid(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    show(fig, alt="; ".join(f"{name}: {', '.join(states).lower()}" for name, states in paths.items()) + ".")
