"""A card that is not there, so that a laptop sees a GPU's start, and what is alive at the worst moment (chapter 6)."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pagedvllm.config import EngineConfig
from pagedvllm.engine.core import EngineCore
from pagedvllm.hub import resolve_model
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.loader import load_model
from pagedvllm.worker import worker
from pagedvllm.worker.memory import MemorySnapshot
from pagedvllm.worker.profile import AllocationCounter, count_activations
from pagedvllm.worker.worker import Worker

STAGES = ("init_device", "load_model", "profile_run", "initialize_cache")  # methods of Worker, in order


class PretendGPU(AllocationCounter):  # type: ignore[no-untyped-call]
    """A card as far as memory goes: it holds this process's tensors, and no more than it has room for.

    The tensors are real ones and lie in RAM; only the card is made up. Nothing rounds their sizes, no library has a
    workspace, and what others hold does not change unless `others` is set.
    """

    counts_tensors = True

    def __init__(self, total: int, others: int = 0) -> None:
        super().__init__()
        self.total, self.others, self.loading = total, others, False

    def snapshot(self) -> MemorySnapshot:
        gc.collect()
        return MemorySnapshot(self.total, self.total - self.others - self.live, self.live, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.live

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return  # shapes, and no bytes
        super()._add(storage)
        if self.live > self.total - self.others and not self.loading:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@contextmanager
def pretend_gpu(total: int, others: int = 0) -> Iterator[PretendGPU]:
    """Workers that start inside find a card of `total` bytes, of which somebody else holds `others`."""
    card = PretendGPU(total, others)

    def load(*args: Any) -> DecoderForCausalLM:
        """What is read before it is copied to a card lies in RAM: it takes no room there."""
        card.loading = True
        try:
            return load_model(*args)
        finally:
            card.loading = False
            card.reset_peak()

    with patch.multiple(worker, device_memory=lambda device: card, load_model=load), card:
        yield card


def cut_model(num_layers: int = 2) -> str:
    """A directory with the embedded model's config.json, of fewer layers: for starts with load_format="dummy"."""
    raw = json.loads((resolve_model(None, need_weights=False) / "config.json").read_text("utf-8"))
    _folders.append(tempfile.TemporaryDirectory())
    path = Path(_folders[-1].name) / f"{num_layers}-layers"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": num_layers}), "utf-8")
    (path / "tokenizer.json").write_text("{}", "utf-8")  # must be there, and no worker reads it
    return str(path)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@dataclass
class Stage:
    """One stage of a start. Bytes of tensors: when it was over, and the most while it ran."""

    seconds: float
    after: int
    peak: int


@dataclass
class Watched:
    """An engine core that started on a PretendGPU, and how. Stages are methods of its worker."""

    core: EngineCore
    stages: dict[str, Stage] = field(default_factory=dict)


def watch(config: EngineConfig, card: PretendGPU) -> Watched:
    """Start an engine core on the card and note what each stage took."""
    stages: dict[str, Stage] = {}

    def watched(name: str) -> Callable[..., Any]:
        method = getattr(Worker, name)

        def stage(self: Worker, *args: Any) -> Any:
            card.reset_peak()
            began = time.perf_counter()
            result = method(self, *args)
            stages[name] = Stage(time.perf_counter() - began, card.snapshot().torch_allocated, card.peak)
            return result

        return stage

    methods: dict[str, Any] = {name: watched(name) for name in STAGES}
    with patch.multiple(Worker, **methods):
        return Watched(EngineCore(config), stages)


@dataclass(frozen=True)
class Made:
    """A tensor: the operation that made it, what it is, and the bytes that it keeps."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    def __str__(self) -> str:
        shape = f"[{', '.join(map(str, self.shape))}]"
        return f"{self.operation:11} {shape:15} {self.dtype:9} {self.num_bytes / 2**20:7.1f} MiB"


class PeakTensors(AllocationCounter):  # type: ignore[no-untyped-call]
    """Also says which tensors were alive at the worst moment, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Made] = {}  # id of the storage -> what it is
        self.at_peak: list[Made] = []
        self._highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) in self._storages:  # no weight
                storage, dtype = tensor.untyped_storage(), str(tensor.dtype).removeprefix("torch.")
                made = Made(str(func).split(".")[1], tuple(tensor.shape), dtype, storage.nbytes())
                self.alive.setdefault(id(storage), made)
        if self.peak > self._highest:
            self._highest, self.at_peak = self.peak, list(self.alive.values())
        return result

    def _remove(self, key: int, num_bytes: int) -> None:
        super()._remove(key, num_bytes)
        self.alive.pop(key, None)


def tensors_at_peak(model: DecoderForCausalLM, num_tokens: int, num_seqs: int) -> list[Made]:
    """What is alive at the worst moment that `count_activations` finds."""
    with PeakTensors() as counter:
        count_activations(model, num_tokens, num_seqs)
    alive: list[Made] = counter.at_peak
    return alive
