"""Two profilers, each reduced to a short table: Python's own sees functions, torch's sees operations."""

from __future__ import annotations

import cProfile
import os
import pstats
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What was called how often, and its part of the whole time (its own, without what it called)."""

    name: str
    calls: int
    share: float


def top_functions(run: Callable[[], Any], count: int = 8) -> list[Row]:
    """cProfile: the functions that spent the most time themselves."""
    profile = cProfile.Profile()
    profile.runcall(run)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [(own, calls, _name(*place)) for place, (_, calls, own, _, _) in stats.items()]
    whole = sum(own for own, _, _ in rows)
    return [Row(name, calls, own / whole) for own, calls, name in sorted(rows, reverse=True)[:count]]


def _name(file: str, line: int, function: str) -> str:
    """`sampler.py draw`, `built-in linear`: no path, no line."""
    if file == "~":
        return f"built-in {function.strip('<>').split()[-1].rpartition('.')[2]}"
    return f"{Path(file).name} {function}"


def top_operations(run: Callable[[], Any], count: int = 8) -> list[Row]:
    """torch.profiler: the operations that spent the most time themselves, on the device where there is one."""
    import torch

    with _quiet(), torch.profiler.profile() as profile:
        run()
    averages: Any = profile.key_averages()
    on_device = torch.cuda.is_available()
    rows = [(r.self_device_time_total if on_device else r.self_cpu_time_total, r.count, r.key) for r in averages]
    whole = sum(own for own, _, _ in rows)
    return [Row(name, calls, own / whole) for own, calls, name in sorted(rows, reverse=True)[:count]]


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes the time of day to the process's own stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def table(rows: list[Row]) -> str:
    """As text, a line each."""
    return "\n".join(f"{row.share:6.1%} {row.calls:6}  {row.name}" for row in rows)
