"""Workload files: which requests arrive when, under which limits. Mistakes are named by field."""

from __future__ import annotations

import difflib
import json
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from pagedvllm.config import SchedulerConfig, check_choice, check_range, check_types

PROMPT_VOCAB = 50_000


@dataclass(frozen=True)
class WorkloadEngine:
    """The engine's limits, with vLLM's names. num_blocks counts block 0, never handed out."""

    num_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    groups: list = field(default_factory=lambda: ["full"])  # type: ignore[type-arg]
    prefix_cache_retention_interval: int = (
        0  # of sliding windows and recurrent states: full attention keeps all
    )
    hash_algo: str = "sha256"  # no decision depends on it
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        check_types(self)
        if self.groups != ["full"]:
            raise ValueError(
                f"groups must be ['full'] (one group of full attention), got {self.groups!r}"
            )
        check_range("num_blocks", self.num_blocks, 2)
        check_range("block_size", self.block_size, 1)
        check_range("max_model_len", self.max_model_len, 1)
        check_range("max_steps", self.max_steps, 1)
        self.scheduler_config()

    def scheduler_config(self) -> SchedulerConfig:
        names = {f.name for f in fields(SchedulerConfig)} & {f.name for f in fields(self)}
        return SchedulerConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class WorkloadTokens:
    """The model: a function of request and position, or of position and the last token."""

    mode: str = "per_request"
    seed: int = 0
    vocab: int = PROMPT_VOCAB

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("mode", self.mode, ("per_request", "content"))
        check_range("vocab", self.vocab, 1)

    def next_token(self, request_id: str, token_ids: list[int]) -> int:
        last = request_id if self.mode == "per_request" else None
        position = len(token_ids)
        key = (
            f"{self.seed}:{last}:{position}"
            if last is not None
            else f"{self.seed}:{position}:{token_ids[-1]}"
        )
        return _draw(key, self.vocab)


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: what arrives, and before which step."""

    id: str
    arrival_step: int
    prompt: list  # type: ignore[type-arg]  # token ids, or segments {"seed": s, "len": n}
    max_tokens: int
    priority: int = 0
    arrival_time: float | None = None  # None: its place in the list
    cache_salt: str | None = None
    stop_token_ids: list | None = None  # type: ignore[type-arg]
    abort_step: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_range("arrival_step", self.arrival_step, 0)
        check_range("max_tokens", self.max_tokens, 1)
        if not self.prompt_token_ids:
            raise ValueError("prompt is empty")
        if not all(isinstance(token, int) for token in self.stop_token_ids or ()):
            raise TypeError(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}"
            )

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        tokens: list[int] = []
        for part in self.prompt:
            if isinstance(part, int) and not isinstance(part, bool):
                tokens.append(part)
            elif (
                isinstance(part, dict)
                and set(part) == {"seed", "len"}
                and isinstance(part["len"], int)
            ):
                tokens += [
                    _draw(f"p:{part['seed']}:{i}", PROMPT_VOCAB) for i in range(part["len"])
                ]
            else:
                raise TypeError(
                    f'prompt must hold token ids or segments {{"seed": s, "len": n}}, got {part!r}'
                )
        return tokens


@dataclass(frozen=True)
class Workload:
    """A whole file."""

    name: str
    engine: WorkloadEngine
    tokens: WorkloadTokens
    requests: list[WorkloadRequest]
    record_free_queue: bool = True


def load(path: str | Path) -> Workload:
    """Raises OSError if it cannot be read; ValueError or TypeError, by field, if it is wrong."""
    try:
        data = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return parse(data)


def parse(data: Any) -> Workload:
    """A workload from the contents of its file."""
    if not isinstance(data, dict):
        raise TypeError(f"a workload must be a JSON object, got {type(data).__name__}")
    _known(data, {"name", "doc", "engine", "tokens", "requests", "record_free_queue"}, "")
    listed = data.get("requests")
    if not isinstance(listed, list):
        raise TypeError(f"requests must be a list, got {listed!r}")
    record = data.get("record_free_queue", True)
    if not isinstance(record, bool):
        raise TypeError(f"record_free_queue must be bool, got {record!r}")
    requests = [
        _section(WorkloadRequest, item, f"requests[{i}]") for i, item in enumerate(listed)
    ]
    names = [request.id for request in requests]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"requests[{i}].id: {name!r} is used twice")
    engine = _section(WorkloadEngine, data.get("engine", {}), "engine")
    tokens = _section(WorkloadTokens, data.get("tokens", {}), "tokens")
    return Workload(str(data.get("name", "")), engine, tokens, requests, record)


def _section(kind: Any, data: Any, where: str) -> Any:
    """One dataclass from one JSON object; errors say where."""
    if not isinstance(data, dict):
        raise TypeError(f"{where} must be an object, got {data!r}")
    _known(data, {f.name for f in fields(kind)}, f"{where}.")
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
            raise ValueError(f"{where}.{f.name} is missing")
    try:
        return kind(**data)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}.{error}") from None


def _known(data: dict[str, Any], names: set[str], where: str) -> None:
    for name in data:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise ValueError(
                f"{where}{name} is unknown"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )


def _draw(key: str, vocab: int) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:4], "big") % vocab
