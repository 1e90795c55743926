"""What must hold between any two calls of the KV-cache manager, each breach named in words.

Every block is free or held, never both and never neither; as many requests hold it as its
count says; every table has a block for each of its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pagedvllm.kv.block import KVCacheBlock
from pagedvllm.kv.block_pool import BlockPool
from pagedvllm.kv.protocol import blocks_for
from pagedvllm.request import Request


def free_list(pool: BlockPool) -> Iterator[str]:
    """The list is whole in both directions, as long as it says, and has each block once."""
    seen: set[int] = set()
    before: KVCacheBlock | None = None
    for block in pool.free_queue:
        if block.block_id in seen:
            yield f"free list: block {block.block_id} comes twice"
            return
        seen.add(block.block_id)
        if before is not None and block.prev is not before:
            i, j = block.block_id, before.block_id
            yield f"free list: block {i} does not point back to block {j}"
        before = block
    if len(seen) != pool.num_free:
        yield f"free list: it has {len(seen)} blocks, num_free says {pool.num_free}"


def references(
    pool: BlockPool,
    tables: dict[str, list[KVCacheBlock]],
    deferred: Sequence[Sequence[KVCacheBlock]],
) -> Iterator[str]:
    """Every block is free or held; ref_cnt counts the holders.

    The blocks of a deferred free are held until it happens.
    """
    holders: dict[int, list[str]] = defaultdict(list)
    waiting = [("a deferred free", blocks) for blocks in deferred]
    for name, table in [*tables.items(), *waiting]:
        for index, block in enumerate(table):
            i = block.block_id
            if pool.blocks[i] is not block or block is pool.null_block:
                yield f"wrong table entry: {name!r}[{index}] is block {i}, not one of ours"
            holders[i].append(name)
    free = {block.block_id for block in pool.free_queue}
    for block in pool.blocks:
        i, count, names = block.block_id, block.ref_cnt, holders[block.block_id]
        held = f"held by {names or 'nobody'}"
        if count != len(names):
            kind = "leak" if count > len(names) else "double free or wrong table entry"
            yield f"{kind}: block {i} has ref_cnt {count}, but is {held}"
        if i in free and (names or count):
            yield f"double free: block {i} is free, with ref_cnt {count} and {held}"
        if not (i in free or names or count or block is pool.null_block):
            yield f"leak: block {i} is neither free nor held"
    if 0 in free or pool.null_block.block_hash is not None:
        yield "the null block is in the free list or has a hash"


def tables(
    tables: dict[str, list[KVCacheBlock]],
    requests: dict[str, Request],
    block_size: int,
    lookahead: int,
) -> Iterator[str]:
    """Every table belongs to a request, fits its tokens, and has no block twice."""
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
            held = f"{name!r} has {len(ids)} blocks of {block_size}"
            tokens = (
                f"{request.num_computed_tokens} computed of {request.num_tokens} tokens"
            )
            yield f"wrong count: {held}; its {tokens} need {least} to {most}"
    for name, request in requests.items():
        if request.num_computed_tokens and name not in tables:
            computed = request.num_computed_tokens
            yield f"wrong count: {name!r} has {computed} computed tokens and no table"
