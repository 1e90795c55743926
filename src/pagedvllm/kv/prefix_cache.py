"""Automatic prefix caching: full blocks are named by what they hold, and so can be shared.

A block's hash covers its own tokens and, through its parent's hash, all before them: equal
hashes mean equal prefixes. Idea: Zheng et al., "SGLang" (RadixAttention), 2024.
vLLM: cached_block_hash_to_block in v1/core/block_pool.py, hash_block_tokens in
v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from pagedvllm.kv.block import KVCacheBlock
from pagedvllm.kv.block_pool import BlockPool
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.request import Request

ROOT = bytes(32)  # the parent of a first block

ExtraKeys = tuple[tuple[str, int | str], ...]


def hash_block(parent: bytes, token_ids: Sequence[int], extra: ExtraKeys = ()) -> bytes:
    """32 bytes that stand for a block's tokens and all before them.

    extra: what else keys and values depend on, tagged with its kind: a salt may be spelt
    like the name of an adapter.
    """
    digest = sha256(parent)
    digest.update(array("q", token_ids).tobytes())
    if extra:
        digest.update(repr(extra).encode())
    return digest.digest()


def extra_keys(request: Request, index: int) -> ExtraKeys:
    """What goes into a hash besides tokens. The chain carries a salt on from the first."""
    keys: list[tuple[str, int | str]] = []
    if request.lora_id is not None:
        keys.append(("lora", request.lora_id))
    if index == 0 and request.cache_salt is not None:
        keys.append(("salt", request.cache_salt))
    return tuple(keys)


class CachingBlockPool(BlockPool):
    """A pool that finds blocks by what they hold, until they are handed out again."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.index: dict[
            bytes, dict[int, KVCacheBlock]
        ] = {}  # copies of a text, earliest first

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        copies = self.index.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def register(self, block: KVCacheBlock, block_hash: bytes) -> None:
        block.block_hash = block_hash
        self.index.setdefault(block_hash, {})[block.block_id] = block

    def forget(self, block: KVCacheBlock) -> None:
        """Nobody can hit this block any more."""
        if block.block_hash is None:
            return
        copies = self.index[block.block_hash]
        del copies[block.block_id]
        if not copies:
            del self.index[block.block_hash]
        block.block_hash = None

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """As in the pool. What the blocks held is gone from now on."""
        taken = super().allocate(num_blocks)
        for block in taken:
            self.forget(block)
        return taken


class PrefixCachingManager(KVCacheManager):
    """A KV-cache manager whose requests begin with the blocks that others have computed."""

    pool: CachingBlockPool

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._registered: dict[str, int] = {}  # blocks of each table in the index

    def make_pool(self, num_blocks: int) -> CachingBlockPool:
        return CachingBlockPool(num_blocks)

    def block_hash(self, request: Request, index: int) -> bytes:
        """The hash of a full block. Each is computed once, and needs the one before."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            i, parent = len(hashes), hashes[-1] if hashes else ROOT
            tokens = request.token_ids[i * size : (i + 1) * size]
            hashes.append(hash_block(parent, tokens, extra_keys(request, i)))
        return hashes[index]

    def cached_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached blocks from the start, short of the last token.

        That one is computed in any case: its logits are needed.
        """
        found: list[KVCacheBlock] = []
        if (
            request.params.prompt_logprobs is not None
        ):  # it needs those of every prompt token
            return found
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.find(self.block_hash(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, request: Request, num_tokens: int) -> None:
        """Announce full blocks, before they are computed. Guessed tokens are not announced.

        A hit in the same step is right: each layer writes all rows before any row reads.
        """
        first = self._registered.get(request.request_id, 0)
        last = min(num_tokens, request.num_tokens) // self.block_size
        if last <= first:
            return
        table = self.tables[request.request_id]
        for index in range(first, last):
            if table[index].block_hash is None:
                self.pool.register(table[index], self.block_hash(request, index))
        self._registered[request.request_id] = last

    def free(self, request: Request, until: int = 0) -> None:
        self._registered.pop(request.request_id, None)
        super().free(request, until)

    def forget(self, request: Request, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens are in its blocks: announce the rest no more."""
        super().forget(request, num_tokens)
        kept = min(
            self._registered.get(request.request_id, 0), num_tokens // self.block_size
        )
        self._registered[request.request_id] = kept

    def discard(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self.pool.forget(block)

    def problems(self, requests: dict[str, Request]) -> Iterator[str]:
        yield from super().problems(requests)
        for block_hash, copies in self.pool.index.items():
            for i, block in copies.items():
                if block.block_hash != block_hash:
                    yield f"stale hash: block {i} is in the index under another hash"
        for block in self.pool.blocks:
            i, own = block.block_id, block.block_hash
            if own is not None and i not in self.pool.index.get(own, {}):
                yield f"stale hash: block {i} has a hash, but the index does not know it"
        for name, table in self.tables.items():
            if name in requests:
                yield from self._hash_problems(requests[name], table)

    def _hash_problems(self, request: Request, table: list[KVCacheBlock]) -> Iterator[str]:
        """The hashes of a table's blocks are those of its request's tokens."""
        parent, size, name = ROOT, self.block_size, request.request_id
        for index, block in enumerate(table):
            tokens = request.token_ids[index * size : (index + 1) * size]
            parent = hash_block(parent, tokens, extra_keys(request, index))
            right = parent if index < self._registered.get(name, 0) else None
            if block.block_hash != right:
                where = f"{name!r}[{index}], block {block.block_id}"
                yield f"stale hash: {where}, is named after tokens that it does not hold"
