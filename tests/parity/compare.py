"""Is our trace of a workload vLLM's trace? Field by field, the order of scheduling included."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pagedvllm.replay import replay
from pagedvllm.workload import load

NOT_COMPARED = {"num_common_prefix_blocks", "block_hashes"}  # of cascade attention; of another hash function
ORDERED = {"scheduled"}  # a JSON object whose order says who went first


def differences(
    workload: Path, check: bool = False, kv_manager: str = "auto", skip: frozenset[str] = frozenset()
) -> str:
    """ "" if NAME.trace.jsonl beside NAME.workload.json is what we print; otherwise where it differs first.

    check: walk our invariants after each step. skip: fields not to compare.
    """
    trace = workload.with_name(workload.name.replace(".workload.json", ".trace.jsonl"))
    theirs = (json.loads(line) for line in trace.read_text().splitlines())
    ours = (json.loads(json.dumps(line)) for line in replay(load(workload), kv_manager, check))
    for number, (want, got) in enumerate(zip_longest(theirs, ours), 1):
        if want is None or got is None:
            return f"{trace.name}:{number}: {'they' if want is None else 'we'} have no such line"
        want, got = strip(want, skip), strip(got, skip)
        for field in sorted(want.keys() | got.keys()):
            if want.get(field) != got.get(field):
                return f"{trace.name}:{number}: {field}: vLLM {want.get(field)}, we {got.get(field)}"
    return ""


def strip(line: dict[str, Any], skip: frozenset[str]) -> dict[str, Any]:
    """A trace line without what is not compared, ordered objects as lists."""
    kept = {name: value for name, value in line.items() if name not in NOT_COMPARED | skip}
    for name in ORDERED & kept.keys():
        kept[name] = list(kept[name].items())
    if "requests" in kept:
        kept["requests"] = {
            name: {field: value for field, value in request.items() if field not in NOT_COMPARED | skip}
            for name, request in kept["requests"].items()
        }
    return kept
