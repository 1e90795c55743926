"""Everything that can be set, as plain frozen data; what is unknown or ill-typed raises.

The names and defaults are vLLM's (config/model.py, cache.py, scheduler.py, parallel.py, compilation.py).
Settings of later chapters are here from the start; an engine that cannot honour one refuses
it by name (`EngineConfig.refuse_unused`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
POLICIES = ("fcfs", "priority")

ENGINES = {
    "reference": "pagedvllm.reference_engine:ReferenceEngine",
    "recompute": "pagedvllm.reference_engine:RecomputeEngine",
    "paged": "pagedvllm.engine.paged_loop:PagedEngine",
    "default": "pagedvllm.engine.llm_engine:LLMEngine",
}
EXECUTORS = {"uni": "pagedvllm.engine.executor:UniProcExecutor"}
WORKERS = {
    "simple": "pagedvllm.engine.simple_worker:SimpleWorker",
    "eager": "pagedvllm.worker.worker:Worker",
    "default": "pagedvllm.worker.graph_worker:GraphWorker",
}
RUNNERS = {
    "simple": "pagedvllm.engine.simple_runner:SimpleRunner",
    "default": "pagedvllm.worker.model_runner:ModelRunner",
}
ATTENTION_BACKENDS = {
    "torch": "pagedvllm.attention.torch_paged:TorchPagedAttention",
    "triton": "pagedvllm.attention.triton_paged:TritonPagedAttention",
}
KV_MANAGERS = {
    "counting": "pagedvllm.kv.protocol:CountingKVCache",
    "plain": "pagedvllm.kv.manager:KVCacheManager",
    "prefix": "pagedvllm.kv.prefix_cache:PrefixCachingManager",
}
SCHEDULERS = {
    "default": "pagedvllm.sched.scheduler:Scheduler",
    "recording": "pagedvllm.sched.recorder:RecordingScheduler",
}
OPS = {"torch": "pagedvllm.ops:TorchOps", "triton": "pagedvllm.kernels.ops:TritonOps"}
GRAPH_RECORDERS = {
    "cuda": "pagedvllm.worker.cuda_graph:CudaGraphRecorder",
    "tape": "pagedvllm.worker.graph_tape:TapeRecorder",
}


_HINTS: dict[type, dict[str, Any]] = {}  # evaluating them takes most of a millisecond


def check_types(config: Any) -> None:
    """Raise TypeError, naming the field, if a value is not of its field's declared type."""
    kind = type(config)
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    for name, hint in _HINTS[kind].items():
        allowed = tuple(get_origin(t) or t for t in get_args(hint) or (hint,))
        value = getattr(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
            continue
        if not isinstance(value, allowed) or (
            isinstance(value, bool) and bool not in allowed
        ):
            expected = " or ".join(
                "None" if t is type(None) else t.__name__ for t in allowed
            )
            raise TypeError(f"{name} must be {expected}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_range(
    name: str, value: float | None, low: float, high: float = float("inf")
) -> None:
    """None (not set) passes; NaN never does."""
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {value}")


def check_name(name: str, value: str, table: dict[str, str]) -> None:
    """A part is chosen by a short name from a table, or as module:Class."""
    if ":" not in value:
        check_choice(name, value, tuple(table))


@dataclass(frozen=True)
class ModelConfig:
    """Which model, where and how.

    model: an embedded name, a directory or a hub name; None: PAGEDVLLM_MODEL, else embedded.
    dtype: "auto": fp32 on a CPU; on a GPU bf16 from compute capability 8.0 on, else fp16.
    device: "auto": PAGEDVLLM_DEVICE, else cuda where there is a GPU, else cpu.
    load_format: "dummy": random weights from `seed`, whatever the checkpoint holds.
    max_model_len: tokens of prompt plus output; None: what the model was trained for.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_range("max_model_len", self.max_model_len, 1)
        check_range("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache (chapters 4, 6 and 9.2)."""

    block_size: int = 16  # tokens
    num_gpu_blocks_override: int | None = None  # None: as many as the memory holds
    gpu_memory_utilization: float = 0.92  # of the card's whole memory
    kv_cache_memory_bytes: int | None = None  # overrides the share above
    enable_prefix_caching: bool = True
    kv_manager: str = "auto"  # "prefix" with prefix caching, else "plain"; or module:Class

    def __post_init__(self) -> None:
        check_types(self)
        check_name("kv_manager", self.kv_manager, {"auto": "", **KV_MANAGERS})
        check_range("block_size", self.block_size, 1)
        check_range("num_gpu_blocks_override", self.num_gpu_blocks_override, 2, 2**50)
        check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        check_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**50)

    @property
    def manager(self) -> str:
        """module:Class of the KV-cache manager."""
        if self.kv_manager == "auto":
            return KV_MANAGERS["prefix" if self.enable_prefix_caching else "plain"]
        return KV_MANAGERS.get(self.kv_manager, self.kv_manager)


@dataclass(frozen=True)
class SchedulerConfig:
    """Who advances in a step, and by how much (chapters 3 and 9.1)."""

    max_num_seqs: int | None = None  # None: by device, as in vLLM
    max_num_batched_tokens: int | None = None
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: no limit
    watermark: float = 0.0  # of the blocks, kept free while something runs
    scheduler_reserve_full_isl: bool = True  # admit only who fits with its whole sequence
    scheduler_cls: str = "default"  # "recording" keeps a trace; or module:Class

    def __post_init__(self) -> None:
        check_types(self)
        check_name("scheduler_cls", self.scheduler_cls, SCHEDULERS)
        check_range("max_num_seqs", self.max_num_seqs, 1)
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_choice("policy", self.policy, POLICIES)
        check_range("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_range("watermark", self.watermark, 0, 1)


@dataclass(frozen=True)
class AttentionConfig:
    """Who computes attention over the paged cache (chapters 4 and 7.2)."""

    attention_backend: str = "torch"

    def __post_init__(self) -> None:
        check_types(self)
        check_name("attention_backend", self.attention_backend, ATTENTION_BACKENDS)


@dataclass(frozen=True)
class ParallelConfig:
    """Who runs the model (chapters 5 to 7), and on how many devices (chapter 10)."""

    distributed_executor_backend: str = "uni"  # one worker, in the engine's own process
    # "simple": memory by hand; "eager": measured, but no CUDA graphs; or module:Class
    worker_cls: str = "default"
    runner_cls: str = "default"  # "simple": a new batch in each step; or module:Class
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        backend = self.distributed_executor_backend
        check_name("distributed_executor_backend", backend, EXECUTORS)
        check_name("worker_cls", self.worker_cls, WORKERS)
        check_name("runner_cls", self.runner_cls, RUNNERS)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        ):
            check_range(name, getattr(self, name), 1)


@dataclass(frozen=True)
class CompilationConfig:
    """CUDA graphs (chapter 7.3). On a CPU there are none, and nothing here has an effect."""

    enforce_eager: bool = False  # no graphs on a GPU either
    cudagraph_capture_sizes: list[int] | None = None  # None: up to max_num_seqs, or 512
    cudagraph_recorder: str = "auto"  # "cuda" on a GPU; "tape" plays one; or module:Class

    def __post_init__(self) -> None:
        check_types(self)
        check_name(
            "cudagraph_recorder", self.cudagraph_recorder, {"auto": "", **GRAPH_RECORDERS}
        )
        sizes = self.cudagraph_capture_sizes
        if sizes is not None:
            if not sizes or not all(type(size) is int for size in sizes):
                raise TypeError(
                    f"cudagraph_capture_sizes must be batch sizes, got {sizes!r}"
                )
            check_range("cudagraph_capture_sizes", min(sizes), 1)


SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "attention": AttentionConfig,
    "parallel": ParallelConfig,
    "compilation": CompilationConfig,
}


@dataclass(frozen=True)
class EngineConfig:
    """All sections, and the parts chosen by name: from the tables above or `module:Class`."""

    engine: str = "default"
    ops: str = "torch"
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)

    def __post_init__(self) -> None:
        check_types(self)
        check_name("engine", self.engine, ENGINES)
        check_name("ops", self.ops, OPS)

    @classmethod
    def create(cls, **settings: Any) -> EngineConfig:
        """From flat settings, as `LLM(...)` takes them; each goes to the section it is in.

        Raises:
            TypeError: no section knows the name, or the value has the wrong type.
            ValueError: the value is out of range.
        """
        owner = {
            f.name: section for section, kind in SECTIONS.items() for f in fields(kind)
        }
        top = {f.name for f in fields(cls)} - set(SECTIONS)
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        own: dict[str, Any] = {}
        for name, value in settings.items():
            if name in owner:
                parts[owner[name]][name] = value
            elif name in top:
                own[name] = value
            else:
                close = difflib.get_close_matches(name, [*owner, *top], n=1)
                raise TypeError(
                    f"unknown setting {name!r}"
                    + (f"; did you mean {close[0]!r}?" if close else "")
                )
        return cls(
            **own, **{section: kind(**parts[section]) for section, kind in SECTIONS.items()}
        )

    def refuse_unused(self, *used_sections: str) -> None:
        """Raise ValueError, by name, if a setting was changed that an engine does not use."""
        for section in SECTIONS.keys() - set(used_sections):
            values = getattr(self, section)
            for f in fields(values):
                if getattr(values, f.name) != f.default:
                    raise ValueError(
                        f"{f.name} has no effect in engine {self.engine!r}: leave it at {f.default!r}"
                    )
