"""The persistent batch: a row for each running request, written only where it has changed.

Most requests of a step were in the step before, and each has grown by one token. So nothing
is laid out anew: a step's cost on the host follows what is new in it, not the length of what
is there.
vLLM: v1/worker/gpu_input_batch.py, InputBatch; v1/worker/block_table.py, BlockTable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedvllm.engine.worker_base import BatchLimits
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.sample.sampler import SamplingBatch
from pagedvllm.sampling_params import SamplingParams

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RequestState:
    """What stays the same about a request, from its first step to its last.

    vLLM: CachedRequestState in v1/worker/gpu_input_batch.py.
    """

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    generator: torch.Generator


class BlockTables:
    """Row r holds the block ids of the request in row r, padded with 0, the null block.

    `host` and `on_device` are both [num_rows, width] int64, and on a CPU the same memory.
    For a GPU, what has changed is sent once a step.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.host = np.zeros((num_rows, width), np.int64)
        self.lengths = np.zeros(num_rows, np.int64)  # of each row, in blocks
        self.on_device = torch.from_numpy(self.host).to(device)  # on a CPU: not a copy
        self.mirrored = device.type != "cpu"
        self._unsent: list[tuple[int, int, int]] = []  # (row, from, to)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """A request's table has grown."""
        start, width = int(self.lengths[row]), self.host.shape[1]
        end = start + len(block_ids)
        if end > width:
            raise ValueError(f"max_model_len allows tables of {width} blocks, not of {end}")
        self._write(row, start, end, block_ids)
        self.lengths[row] = end

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`, and is empty from now on."""
        self.clear(target)
        length = int(self.lengths[source])
        self._write(target, 0, length, self.host[source, :length])
        self.lengths[target] = length
        self.clear(source)

    def clear(self, row: int) -> None:
        self._write(row, 0, int(self.lengths[row]), 0)
        self.lengths[row] = 0

    def _write(
        self, row: int, start: int, end: int, values: Sequence[int] | Ints | int
    ) -> None:
        self.host[row, start:end] = values
        self._unsent.append((row, start, end))

    def send(self) -> None:
        """Bring the device's copy up to date."""
        if self.mirrored and self._unsent:
            host, flat = self.host.reshape(-1), self.on_device.view(-1)
            width, device = self.host.shape[1], flat.device
            spans = [
                np.arange(row * width + a, row * width + b) for row, a, b in self._unsent
            ]
            places = np.concatenate(spans)
            values = torch.from_numpy(host[places]).to(device, non_blocking=True)
            flat[torch.from_numpy(places).to(device, non_blocking=True)] = values
        self._unsent.clear()

    def of(self, rows: Ints) -> torch.Tensor:
        """Tables of some rows, ascending, on the device: [rows, longest among them]."""
        count, longest = len(rows), int(self.lengths[rows].max())
        if rows[-1] == count - 1:  # the first ones: a view is enough
            return self.on_device[:count, :longest]
        index = torch.from_numpy(rows).to(self.on_device.device)
        return self.on_device[index, :longest]


class InputBatch:
    """Rows 0 to n - 1 are in use, each by one request; which one is of no importance."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        num_rows, longest = limits.max_num_seqs, limits.max_model_len
        self.rows: list[RequestState] = []
        self.row_of: dict[str, int] = {}
        # As large as it could ever be. The system maps memory where it is first written.
        self.token_ids = np.zeros((num_rows, longest), np.int32)
        self._flat = self.token_ids.reshape(-1).data  # cheaper to cut than an array
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.tables = BlockTables(num_rows, blocks_for(longest, limits.block_size), device)

    def add(self, state: RequestState, token_ids: Sequence[int]) -> None:
        """A request without blocks gets the next row. If it has one already, it loses it.

        Raises:
            ValueError: there is no row left, or a row is too short for it.
        """
        self.remove(state.request_id)
        row, count = len(self.rows), len(token_ids)
        num_rows, longest = self.token_ids.shape
        if row == num_rows:
            raise ValueError(f"more requests run than max_num_seqs, {num_rows}")
        if count > longest:
            name = state.request_id
            raise ValueError(
                f"request {name!r}: {count} tokens are more than max_model_len, {longest}"
            )
        self.token_ids[row, :count] = token_ids
        self.num_tokens[row] = count
        self.rows.append(state)
        self.row_of[state.request_id] = row

    def remove(self, request_id: str) -> None:
        """Free a request's row, if it has one. The last row moves into the hole."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last, state = len(self.rows) - 1, self.rows.pop()
        if row == last:
            self.tables.clear(row)
            return
        count = self.num_tokens[last]
        self.token_ids[row, :count] = self.token_ids[last, :count]
        self.num_tokens[row] = count
        self.tables.move(last, row)
        self.rows[row], self.row_of[state.request_id] = state, row

    def append_tokens(self, rows: Ints, tokens: Sequence[int]) -> None:
        """One new token at the end of each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def histories(self, rows: Ints) -> list[memoryview]:
        """The tokens of these rows: views, good until a row changes."""
        starts = rows * self.token_ids.shape[1]
        ends = starts + self.num_tokens[rows]
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return [self._flat[start:end] for start, end in spans]

    def sampling_batch(self, rows: Ints) -> SamplingBatch:
        """What the sampler must know of these rows."""
        states = [self.rows[row] for row in rows.tolist()]
        return SamplingBatch(
            [state.params for state in states],
            [state.generator for state in states],
            self.histories(rows),
            [state.num_prompt_tokens for state in states],
            [state.eos_token_ids for state in states],
        )
