"""What must hold between any two calls of the KV-cache manager, each breach named in words.

Every block is free or held, never both and never neither; as many requests hold it as its count says; every table has a
block for each of its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pagedvllm.kv.block import KVCacheBlock
from pagedvllm.kv.block_pool import BlockPool
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.request import Request


def free_list(pool: BlockPool) -> Iterator[str]:
    """The list is whole in both directions, holds as many blocks as it says, and each of them once."""
    seen: set[int] = set()
    before: KVCacheBlock | None = None
    for block in pool.free_queue:
        if block.block_id in seen:
            yield f"free list: block {block.block_id} comes twice"
            return
        seen.add(block.block_id)
        if before is not None and block.prev is not before:
            yield f"free list: block {block.block_id} does not point back to block {before.block_id}"
        before = block
    if len(seen) != pool.num_free:
        yield f"free list: it has {len(seen)} blocks, num_free says {pool.num_free}"


def references(
    pool: BlockPool, tables: dict[str, list[KVCacheBlock]], deferred: Sequence[Sequence[KVCacheBlock]]
) -> Iterator[str]:
    """Every block is free or held; ref_cnt counts the holders. Blocks of a deferred free are held until it happens."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, table in [*tables.items(), *(("a deferred free", blocks) for blocks in deferred)]:
        for index, block in enumerate(table):
            if pool.blocks[block.block_id] is not block or block is pool.null_block:
                yield f"wrong table entry: {name!r}[{index}] is block {block.block_id}, which is not one to hand out"
            holders[block.block_id].append(name)
    free = {block.block_id for block in pool.free_queue}
    for block in pool.blocks:
        i, names = block.block_id, holders[block.block_id]
        if block.ref_cnt != len(names):
            kind = "leak" if block.ref_cnt > len(names) else "double free or wrong table entry"
            yield f"{kind}: block {i} has ref_cnt {block.ref_cnt}, but is held by {names or 'nobody'}"
        if i in free and (names or block.ref_cnt):
            yield f"double free: block {i} is free, with ref_cnt {block.ref_cnt} and held by {names or 'nobody'}"
        if i not in free and not names and not block.ref_cnt and block is not pool.null_block:
            yield f"leak: block {i} is neither free nor held"
    if 0 in free or pool.null_block.block_hash is not None:
        yield "the null block is in the free list or has a hash"


def tables(
    tables: dict[str, list[KVCacheBlock]], requests: dict[str, Request], block_size: int, lookahead: int
) -> Iterator[str]:
    """Every table belongs to a request, is as long as its tokens need, and has no block twice."""
    for name, table in tables.items():
        ids = [block.block_id for block in table]
        if len(set(ids)) != len(ids):
            yield f"wrong table entry: {name!r} has a block twice: {ids}"
        if name not in requests:
            yield f"leak: {name!r} is gone, but still has a table: {ids}"
            continue
        request = requests[name]
        least = blocks_for(request.num_computed_tokens, block_size)
        most = blocks_for(request.num_tokens + lookahead, block_size)
        if not least <= len(ids) <= most:
            tokens = f"{request.num_computed_tokens} computed of {request.num_tokens} tokens"
            yield f"wrong count: {name!r} has {len(ids)} blocks of {block_size}; its {tokens} need {least} to {most}"
    for name, request in requests.items():
        if request.num_computed_tokens and name not in tables:
            yield f"wrong count: {name!r} has {request.num_computed_tokens} computed tokens and no table"
