"""The engines that schedule, and where each keeps its parts: what one test asks of all of them."""

from __future__ import annotations

from typing import Any

from pagedvllm import LLM

ENGINES: dict[str, dict[str, Any]] = {
    "paged": {"engine": "paged"},
    "simple": {"worker_cls": "simple", "runner_cls": "simple"},
    "default": {},
}


def scheduler_of(llm: LLM) -> Any:
    engine: Any = llm.engine
    return engine.core.scheduler if hasattr(engine, "core") else engine.scheduler


def holder_of(llm: LLM) -> Any:
    """What holds `model` and `attention`: the engine itself, or its one worker's runner."""
    engine: Any = llm.engine
    return engine.core.executor.worker.runner if hasattr(engine, "core") else engine
