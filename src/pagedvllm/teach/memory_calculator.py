"""The memory calculator: one HTML element that cuts a GPU's memory into its parts while settings are turned.

    teach.calculator("Llama-3.1-8B", "H100 80 GB", max_model_len=8192)

The element holds all it needs and asks nobody else. Its numbers come from the engine: what each model needs is counted
here (`memory_plan`), and calculator_web/plan.js does the arithmetic of `memory_plan.plan` over it. Equal arguments give
equal bytes.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from pagedvllm.config import SchedulerConfig
from pagedvllm.model.config import DecoderConfig
from pagedvllm.sched.limits import Device, with_defaults
from pagedvllm.teach.memory_plan import DTYPES, GPUS, MODELS, PROBLEMS, Plan, needs_of, pick, plan
from pagedvllm.worker.memory import size

SCRIPTS = ("words.js", "plan.js", "calculator.js")


class Calculator:
    """The calculator, ready to be shown. Where there is only text, its `repr` says what the first settings give."""

    def __init__(self, data: dict[str, Any], first: Plan) -> None:
        self.data, self.plan = data, first

    def __repr__(self) -> str:
        settings = self.data["settings"]
        chosen = f"{settings['model']}, {settings['dtype']}, on {settings['gpu']}"
        return f"[memory calculator] {chosen}: {summary(self.plan)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.element(), "text/plain": repr(self)}

    def element(self) -> str:
        """The HTML. Its text is what is read where scripts do not run."""
        css, script = _source("calculator.css"), "\n".join(map(_source, SCRIPTS))
        data = json.dumps({**self.data, "css": css}, separators=(",", ":"), ensure_ascii=False)
        # Names come from anywhere: no "<" may end the script element early. In JSON it can only stand inside a string.
        data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        return (
            f'<div class="pagedvllm-calculator" data-lm-suppress-shortcuts="true"><p>{html.escape(repr(self))}</p>\n'
            f'<script type="application/json">{data}</script>\n<script>\n(() => {{\n{script}\n}})();\n</script></div>'
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of its own."""
        title, view = "Memory calculator", '<meta name="viewport" content="width=device-width, initial-scale=1">'
        head = f'<meta charset="utf-8">{view}<meta name="color-scheme" content="light dark"><title>{title}</title>'
        body = f"<main>\n<h1>{title}</h1>\n{self.element()}\n</main>"
        page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
        Path(path).write_text(page, "utf-8")


def calculator(
    model: str = "Llama-3.1-8B",
    gpu: str = "H100 80 GB",
    *,
    models: Mapping[str, DecoderConfig] | None = None,
    gpus: Mapping[str, Device] | None = None,
    **settings: Any,
) -> Calculator:
    """Make the element.

    Args:
        model, gpu: which are chosen at first.
        models, gpus: more to choose from, by name; a GPU is a Device with its memory in bytes.
        settings: fields of `memory_plan.Settings`, as they are at first.

    Raises:
        ValueError: a name is unknown, or a setting out of range.
        TypeError: a setting is unknown.
    """
    models, gpus = {**MODELS, **(models or {})}, {**GPUS, **(gpus or {})}
    first = plan(pick("model", model, models), pick("gpu", gpu, gpus), **settings)
    cards = {name: {"memory": device.memory, "defaults": _defaults(device)} for name, device in gpus.items()}
    data = {
        "settings": {"model": model, "gpu": gpu, **asdict(first.settings)},
        "dtypes": {name: dtype.itemsize for name, dtype in DTYPES.items()},
        "models": {name: _model(config) for name, config in models.items()},
        "gpus": cards,
    }
    return Calculator(data, first)


def _model(config: DecoderConfig) -> dict[str, Any]:
    """What plan.js must know of a model: its needs by the bytes of a number."""
    needs = {dtype.itemsize: asdict(needs_of(config, dtype)) for dtype in (torch.bfloat16, torch.float32)}
    return {"positions": config.max_position_embeddings, "needs": needs}


def _defaults(gpu: Device) -> dict[str, int | None]:
    limits = with_defaults(SchedulerConfig(), gpu, max_model_len=1)
    return {name: getattr(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}


def summary(p: Plan) -> str:
    """A plan in words."""
    s = p.settings
    parts = {"weights": p.weights, "activations": p.activations, "non-torch": s.non_torch, "CUDA graphs": s.cuda_graphs}
    needs = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    head = f"of {size(p.total)} the engine may use {size(p.requested)}: {needs}, KV cache {size(max(0, p.available))}"
    if p.problem:
        return f"{head}. It does not start: {PROBLEMS[p.problem]}"
    return (
        f"{head}, which is {p.num_blocks:,} blocks of {s.block_size} tokens;"
        f" requests of {s.max_model_len:,} tokens: {p.concurrency:.2f} at once"
    )


def _source(name: str) -> str:
    """A file of calculator_web, without indentation and comment lines."""
    lines = (files("pagedvllm.teach") / "calculator_web" / name).read_text("utf-8").splitlines()
    return "\n".join(text for line in lines if (text := line.strip()) and not text.startswith(("//", "/*")))
