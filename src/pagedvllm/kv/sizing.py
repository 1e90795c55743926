"""How many KV blocks a pool has: said by hand, or what fits in so many bytes.

vLLM: v1/core/kv_cache_utils.py, get_kv_cache_configs and get_num_blocks.
"""

from __future__ import annotations

from pagedvllm.config import CacheConfig
from pagedvllm.kv.protocol import blocks_for

DEFAULT_KV_BYTES = 2**30


def bytes_by_hand(cache: CacheConfig, useful: int, who: str) -> int:
    """Bytes for the cache where nobody measures: kv_cache_memory_bytes, else 1 GiB.

    useful: no more than that is ever needed. who: does not measure; for the message.

    Raises:
        ValueError: gpu_memory_utilization was set.
    """
    if cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization:
        raise ValueError(
            f"gpu_memory_utilization has no effect in {who}:"
            " set num_gpu_blocks_override or kv_cache_memory_bytes"
        )
    return cache.kv_cache_memory_bytes or min(DEFAULT_KV_BYTES, useful)


def num_kv_blocks(cache: CacheConfig, available: int, page_bytes: int) -> int:
    """Blocks of `page_bytes` in `available` bytes; num_gpu_blocks_override overrides.

    Raises:
        ValueError: fewer than two, of which the null block is one.
    """
    if cache.kv_manager == "counting":
        raise ValueError(
            "kv_manager 'counting' knows no block from another: a model needs them"
        )
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    num_blocks = available // page_bytes
    if num_blocks < 2:
        least, size = 2 * page_bytes, cache.block_size
        if cache.kv_cache_memory_bytes is None:
            raise ValueError(
                f"block_size {size} is too large: two blocks need {least} bytes, but there"
                f" are {available} for the KV cache"
            )
        raise ValueError(
            f"kv_cache_memory_bytes must be at least {least} (two blocks), got {available}"
        )
    return num_blocks


def useful_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The most that running requests can hold, and the null block: more only caches."""
    return 1 + max_num_seqs * blocks_for(max_model_len, block_size)
