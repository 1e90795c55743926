"""The trace player: one HTML element in which a recorded trace can be read step by step and as a timeline.

    teach.player(scheduler)                             a RecordingScheduler, or an engine's `.scheduler`
    teach.player(replay(workload), workload.engine)     the lines of `pagedvllm replay`, and the limits they ran under
    teach.player("run.trace.jsonl")                     a file of such lines

The element holds all it needs, the trace too, and asks nobody else: it works in Jupyter, on Colab, on the site and as a
page of its own. Whatever it shows was recorded; the scripts in player_web only draw it. Equal traces give equal bytes.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

Line = Mapping[str, Any]

# Sent with a step only when they differ from the step before; all other fields belong to one step.
LASTING = ("running_queue", "waiting_queue", "free_after_schedule", "free_after_update", "free_queue", "refs", "cached")


SCRIPTS = ("words.js", "trace.js", "parts.js", "pool.js", "step_view.js", "timeline.js", "player.js")


class Recorder(Protocol):
    """What `pagedvllm.sched.recorder:RecordingScheduler` has."""

    trace: list[dict[str, Any]]
    config: Any
    kv: Any

    def end(self) -> dict[str, Any]: ...


class Player:
    """A trace, ready to be shown. Jupyter shows the element; where there is only text, its `repr` sums the trace up."""

    def __init__(self, data: dict[str, Any], title: str) -> None:
        self.data, self.title = data, title

    def __repr__(self) -> str:
        return f"[trace player] {self.title}: {summary(self.data)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.element(), "text/plain": repr(self)}

    def element(self) -> str:
        """The HTML. Its text is what is read where scripts do not run."""
        css, script = _source("player.css"), "\n".join(map(_source, SCRIPTS))
        data = json.dumps({**self.data, "title": self.title, "css": css}, separators=(",", ":"), ensure_ascii=False)
        # Ids come from anywhere: no "<" may end the script element early. In JSON it can only stand inside a string.
        data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        return (
            f'<div class="pagedvllm-player" data-lm-suppress-shortcuts="true"><p>{html.escape(repr(self))}</p>\n'
            f'<script type="application/json">{data}</script>\n<script>\n(() => {{\n{script}\n}})();\n</script></div>'
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of its own."""
        title, view = html.escape(self.title), '<meta name="viewport" content="width=device-width, initial-scale=1">'
        head = f'<meta charset="utf-8">{view}<meta name="color-scheme" content="light dark"><title>{title}</title>'
        body = f"<main>\n<h1>{title}</h1>\n{self.element()}\n</main>"
        page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
        Path(path).write_text(page, "utf-8")


def player(trace: Recorder | Iterable[Line] | str | os.PathLike[str], limits: Any = None, *, title: str = "") -> Player:
    """Make the element that shows a trace.

    Args:
        trace: a recording scheduler, the steps themselves (best with the last line, "end"), or a .jsonl file of them.
        limits: an object or a mapping with max_num_batched_tokens and block_size, as a workload's `engine` is; a
            recording scheduler knows its own. Without them the budget is drawn as the most that any step used.
        title: what the trace is about.

    Raises:
        ValueError: there is no step, or a line is not JSON.
        TypeError: a line is not a step of a trace.
        OSError: the file cannot be read.
    """
    lines, own = _read(trace)
    steps = [line for line in lines if not line.get("end")]
    end = next((line for line in lines if line.get("end")), None)
    if not steps:
        raise ValueError("trace has no step")
    data = compact(steps, end, own if limits is None else limits)
    return Player(data, title or f"{len(steps)} steps of {len(data['requests'])} requests")


def _read(trace: Any) -> tuple[list[Line], Any]:
    """The lines of a trace, and what limits its source knows."""
    limits = None
    if isinstance(trace, (str, os.PathLike)):
        lines = list(_parse(Path(trace)))
    elif hasattr(trace, "trace"):
        lines = [*trace.trace, trace.end()]
        sizes = {"block_size": trace.kv.block_size}
        limits = sizes | {"max_num_batched_tokens": trace.config.max_num_batched_tokens}
    else:
        lines = list(trace)
    for number, line in enumerate(lines):
        if not isinstance(line, Mapping) or not ("step" in line or line.get("end")):
            raise TypeError(f"trace: line {number} must be a dict with the key 'step' or 'end', got {line!r:.80}")
    return lines, limits


def _parse(path: Path) -> Iterable[Any]:
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"trace: {path.name} line {number} is not JSON: {error}") from None


# ---------------------------------------------------------------- from a trace to what the element holds


def compact(steps: Sequence[Line], end: Line | None, limits: Any) -> dict[str, Any]:
    """The trace in few bytes: every field at most once as long as it stays the same, and runs of block ids as "3-9"."""
    packed, before, tables = [], dict[str, Any](), dict[str, Any]()
    for line in steps:
        step = _pack(line)
        now = step.pop("tables", tables)
        changed = {name: table for name, table in now.items() if tables.get(name) != table}
        changed |= {name: None for name in tables if name not in now}
        short = {key: value for key, value in step.items() if key not in LASTING or before.get(key) != value}
        packed.append(short | ({"tables": changed} if changed else {}))
        before, tables = before | step, now
    known = {name: int(v) for name in ("max_num_batched_tokens", "block_size") if (v := _limit(limits, name))}
    return {"requests": _requests(steps), "prompts": _prompts(end), **known, "blocks": _usable(steps), "steps": packed}


def _pack(line: Line) -> dict[str, Any]:
    """One step, without what is empty or can be read off another field."""
    if line.get("idle"):
        return {"step": line["step"], "idle": True}
    names = ("arrived", "aborted", "new", "resumed", "preempted", "scheduled", "admitted_computed", "sampled")
    out = {"step": line["step"]} | {name: line[name] for name in (*names, "finished") if line.get(name)}
    out |= {name: line[name] for name in LASTING if name in line}
    if "blocks" in line:
        out["tables"] = {name: _table(blocks) for name, blocks in line["blocks"].items()}
    if "free_queue" in line:
        out["free_queue"] = runs(line["free_queue"])
    if "cached_blocks" in line:
        out["cached"] = runs(line["cached_blocks"])
    if "ref_cnt" in line:
        counts: dict[int, list[int]] = {}
        for block, count in line["ref_cnt"].items():
            counts.setdefault(count, []).append(int(block))
        out["refs"] = {str(count): runs(blocks) for count, blocks in sorted(counts.items())}
    return out


def _table(blocks: list[Any]) -> str | int:
    """A block table as runs, "|" between KV-cache groups; only its length where blocks are counted and have no id."""
    groups = blocks if blocks and isinstance(blocks[0], list) else [blocks]
    if all(block == -1 for group in groups for block in group):
        return max(map(len, groups))
    return "|".join(map(runs, groups))


def runs(ids: Iterable[int]) -> str:
    """[1, 2, 3, 9, 4] -> "1-3 9 4": the order stays."""
    found: list[list[int]] = []
    for block in ids:
        if found and found[-1][1] + 1 == block:
            found[-1][1] = block
        else:
            found.append([block, block])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _limit(limits: Any, name: str) -> Any:
    return limits.get(name) if isinstance(limits, Mapping) else getattr(limits, name, None)


def _requests(steps: Sequence[Line]) -> list[str]:
    """Every request that a step names, in order of arrival: a part of a trace may not hold the arrival itself."""
    fields = ("arrived", "running_queue", "waiting_queue", "scheduled", "blocks", "aborted", "preempted", "finished")
    names = {name: None for line in steps for field in fields for name in line.get(field, ())}
    return list(names)


def _prompts(end: Line | None) -> dict[str, int]:
    """The length of each prompt, in tokens: only the last line of a trace tells."""
    requests = end.get("requests", {}) if end else {}
    return {name: request["prompt_len"] for name, request in requests.items() if "prompt_len" in request}


def _usable(steps: Sequence[Line]) -> int:
    """Blocks that can be handed out: those free and those in use add up to it in every step."""
    most = 0
    for line in steps:
        free = line.get("free_after_schedule", 0)
        tables = line.get("blocks", {}).values()
        flat = [block for table in tables for part in table for block in (part if isinstance(part, list) else [part])]
        held = flat.count(-1) + len(set(flat) - {-1, 0})
        known = len(line.get("free_queue", ())) + len(line.get("ref_cnt", ()))
        most = max(most, free + held, known)
    return most


def summary(data: Mapping[str, Any]) -> str:
    """What the trace holds, in words."""
    steps = data["steps"]
    tokens = sum(sum(step.get("scheduled", {}).values()) for step in steps)
    hits = sum(sum(step.get("admitted_computed", {}).values()) for step in steps)
    running = max(len(step.get("running_queue", ())) for step in steps)
    preempted = [f"{name} at step {step['step']}" for step in steps for name in step.get("preempted", ())]
    shown = ", ".join(preempted[:6]) + (", ..." if len(preempted) > 6 else "")
    parts = [
        f"{len(steps)} steps, {len(data['requests'])} requests, {data['blocks']} blocks",
        f"{tokens} tokens computed and {hits} found in the cache",
        f"at most {running} requests running",
        f"{len(preempted)} preemptions ({shown})" if preempted else "no preemption",
    ]
    return "; ".join(parts)


def _source(name: str) -> str:
    """A file of player_web, without indentation and comment lines."""
    lines = (files("pagedvllm.teach") / "player_web" / name).read_text("utf-8").splitlines()
    return "\n".join(text for line in lines if (text := line.strip()) and not text.startswith(("//", "/*")))
