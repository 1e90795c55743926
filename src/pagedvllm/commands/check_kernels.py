"""`pagedvllm check --kernels`: what each kernel occupies on cards that need not be here."""

from __future__ import annotations

import sys
from typing import Any

from pagedvllm.kernels.catalogue import compile_all
from pagedvllm.kernels.compile import SHARED_KIB


def table(targets: list[int]) -> tuple[dict[str, Any], list[str]]:
    """(kernel, target and form -> what it occupies; what is wrong). No targets: all.

    Raises:
        ValueError: a target is unknown.
    """
    for target in targets:
        if target not in SHARED_KIB:
            known = ", ".join(map(str, SHARED_KIB))
            raise ValueError(f"--kernels must be some of {known}; got {target}")
    rows: dict[str, Any] = {}
    faults: list[str] = []
    for label, found in compile_all(tuple(targets or SHARED_KIB)):
        name = f"sm_{found.target} {found.kernel} {label}"
        shared, registers, spills = found.shared, found.registers, found.spills
        rows[name] = f"{shared} B shared, {registers} registers, {spills} B spilled"
        faults += [f"{name}: {fault}" for fault in found.faults()]
        if sys.stderr.isatty():
            print(f"\r{len(rows)} kernels compiled", end="", file=sys.stderr, flush=True)
    return rows, faults
