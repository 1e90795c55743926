"""pagedvllm: an LLM serving engine that a book can show whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if (
    TYPE_CHECKING
):  # for editors and mypy; at run time a name costs nothing until it is asked for
    from pagedvllm.config import EngineConfig as EngineConfig
    from pagedvllm.llm import LLM as LLM
    from pagedvllm.outputs import RequestOutput as RequestOutput
    from pagedvllm.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
_HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
}
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedvllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pagedvllm.{_HOMES[name]}"), name)
