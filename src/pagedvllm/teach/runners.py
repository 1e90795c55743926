"""Runners without a model: what a step costs the host, and which numbers it writes (chapter 7.1, its lab)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.ops import TorchOps
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.sched.output import NewRequestData, SchedulerOutput

BLOCK_SIZE = 16
ROUNDS = 12  # of `host_times`; the best one counts


class NoModel:
    """Takes a batch and computes nothing: every next token is token 0."""

    def __init__(self, device: torch.device) -> None:
        self.build = SimpleNamespace(device=device)

    def __call__(self, token_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1, device=token_ids.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def without_model(kind: Any, limits: BatchLimits, device: str = "cpu") -> Any:
    """A runner of that class, for a model that takes no time."""
    return kind(NoModel(torch.device(device)), None, TorchOps(), limits, 0)


def new_request(name: str, token_ids: Sequence[int], **params: Any) -> NewRequestData:
    """What a scheduler tells of a request that the runner has not heard of. Greedy, unless params say otherwise."""
    settings = SamplingParams(**({"temperature": 0, "max_tokens": 99} | params))
    return NewRequestData(name, list(token_ids), len(token_ids), settings, ())


# ---------------------------------------------------------------- time


def decode_steps(num_requests: int, context: int, block_size: int = BLOCK_SIZE) -> Iterator[SchedulerOutput]:
    """The notes of steps in which each request decodes one token; in the first, the last of `context` tokens.

    (That the tokens before it were never computed is of no importance to a runner without a model.)
    """
    names = [f"r{i}" for i in range(num_requests)]
    prompt, held, next_block = [7] * context, 0, 1  # held: blocks of each request
    note = SchedulerOutput(1, scheduled_new_reqs=[new_request(name, prompt) for name in names])
    while True:
        stored = context + note.step - 1
        missing = blocks_for(stored, block_size) - held
        for name in names:
            note.add(name, stored - 1, 1, list(range(next_block, next_block + missing)))
            next_block += missing
        held += missing
        yield note
        note = SchedulerOutput(note.step + 1)


def host_times(
    kinds: Mapping[str, Any], num_requests: int, context: int, block_size: int = BLOCK_SIZE
) -> dict[str, float]:
    """Milliseconds that a decode step takes each kind of runner, when the model takes none.

    All kinds take turns, so that whatever else the machine does slows all of them; the best round counts.
    """
    limits = BatchLimits(num_requests, num_requests, context + ROUNDS + 1, block_size)
    runners = {name: without_model(kind, limits) for name, kind in kinds.items()}
    best = dict.fromkeys(kinds, float("inf"))
    for note in islice(decode_steps(num_requests, context, block_size), ROUNDS + 1):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.execute(note)
            if note.step > 1:  # the first one brings the requests
                best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


# ---------------------------------------------------------------- what is written


class Watched(np.ndarray[Any, np.dtype[Any]]):
    """An array that remembers which of its numbers were written."""

    written: NDArray[np.bool_] | None = None  # of the array itself; copies and cuts of it are not watched

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.written is not None:
            self.written[key] = True
        super().__setitem__(key, value)


@dataclass(frozen=True)
class Rows:
    """The persistent batch after a step."""

    names: list[str]  # of the requests, row by row
    num_tokens: list[int]  # of each row
    tables: list[list[int]]  # block ids of each row
    tokens_written: NDArray[np.bool_]  # [rows, max_model_len]: in this step
    blocks_written: NDArray[np.bool_]  # [rows, longest table]
    num_written: int  # numbers, those of the two columns of lengths included


@dataclass
class Writes:
    """Watches what a ModelRunner writes into its batch, from now on."""

    runner: Any
    _arrays: list[Watched] = field(default_factory=list)

    def __post_init__(self) -> None:
        batch = self.runner.batch
        for owner, name in (
            (batch, "token_ids"),
            (batch, "num_tokens"),
            (batch.tables, "host"),
            (batch.tables, "lengths"),
        ):
            array = getattr(owner, name).view(Watched)
            setattr(owner, name, array)
            self._arrays.append(array)
        self.forget()

    def forget(self) -> None:
        for array in self._arrays:
            array.written = np.zeros(array.shape, bool)

    def rows(self) -> Rows:
        """What the batch looks like now, and what was written since the last call."""
        batch = self.runner.batch
        count = len(batch.rows)
        masks = [array.written for array in self._arrays]
        tokens, _, blocks, _ = masks
        assert tokens is not None and blocks is not None
        tables = [batch.tables.host[r, : batch.tables.lengths[r]].tolist() for r in range(count)]
        names, lengths = [row.request_id for row in batch.rows], batch.num_tokens[:count].tolist()
        num_written = sum(int(mask.sum()) for mask in masks if mask is not None)
        self.forget()
        return Rows(names, lengths, tables, tokens, blocks, num_written)
