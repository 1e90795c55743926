"""Settings: flat in, frozen out, and every mistake named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from pagedvllm import EngineConfig


def test_flat_settings_find_their_section() -> None:
    config = EngineConfig.create(model="m", block_size=32, policy="priority", tensor_parallel_size=2, watermark=0)
    assert (config.model.model, config.cache.block_size, config.scheduler.policy) == ("m", 32, "priority")
    assert config.parallel.tensor_parallel_size == 2
    with pytest.raises(FrozenInstanceError):
        config.cache.block_size = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"max_num_seq": 4}, TypeError, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"colour": 1}, TypeError, "unknown setting 'colour'$"),
        ({"block_size": "16"}, TypeError, "block_size must be int, got '16'"),
        ({"block_size": True}, TypeError, "block_size must be int, got True"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"enable_prefix_caching": 1}, TypeError, "enable_prefix_caching must be bool"),
        ({"gpu_memory_utilization": 1.2}, ValueError, "gpu_memory_utilization must be between 0 and 1, got 1.2"),
        ({"gpu_memory_utilization": float("nan")}, ValueError, "gpu_memory_utilization"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be at least 1"),
        ({"max_model_len": 1.5}, TypeError, "max_model_len must be int or None"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of auto, float32, float16, bfloat16; got 'int8'"),
        ({"policy": "lifo"}, ValueError, "policy must be one of fcfs, priority"),
        ({"engine": "fast"}, ValueError, "engine must be one of reference, recompute"),
        ({"load_format": "gguf"}, ValueError, "load_format must be one of auto, dummy"),
        ({"seed": -1}, ValueError, "seed must be between 0 and"),
    ],
)
def test_mistakes_are_named(setting: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig.create(**setting)


def test_an_engine_refuses_what_it_cannot_honour() -> None:
    config = EngineConfig.create(engine="reference", max_num_seqs=4)
    with pytest.raises(ValueError, match="max_num_seqs has no effect in engine 'reference': leave it at None"):
        config.refuse_unused("model")
    config.refuse_unused("model", "scheduler")
