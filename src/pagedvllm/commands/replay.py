"""`pagedvllm replay`: a workload through scheduler and KV-cache manager, one JSON line for each step."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pagedvllm.config import KV_MANAGERS
from pagedvllm.replay import replay
from pagedvllm.workload import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", help="a file NAME.workload.json")
    parser.add_argument(
        "--kv-manager",
        default="auto",
        help=f"auto (the workload decides), {', '.join(KV_MANAGERS)} or module:Class",
    )
    parser.add_argument(
        "--check", action="store_true", help="walk all invariants after each step"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="print totals, as one JSON object, instead of the steps",
    )


def run(args: argparse.Namespace) -> int:
    lines = replay(load(args.workload), args.kv_manager, args.check)
    try:
        if args.summary:
            print(json.dumps(summary(lines)))
        else:
            for line in lines:
                print(json.dumps(line, separators=(",", ":")))
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # the reader of our output has gone (as in `| head -1`): not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def summary(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Totals of a trace."""
    start, totals = time.perf_counter(), Counter[str]()
    last: dict[str, Any] = {}
    for last in lines:
        totals["scheduled_tokens"] += last.get("total", 0)
        totals["sampled_tokens"] += len(last.get("sampled", ()))
        totals["preemptions"] += len(last.get("preempted", ()))
        totals["cached_tokens"] += sum(last.get("admitted_computed", {}).values())
        totals["most_running"] = max(
            totals["most_running"], len(last.get("running_queue", ()))
        )
    statuses = Counter(request["status"] for request in last["requests"].values())
    return {
        "steps": last["steps"],
        "seconds": round(time.perf_counter() - start, 4),
        "requests": dict(statuses),
        **totals,
        "leaked_blocks": last["leaked_blocks"],
    }
