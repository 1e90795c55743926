"""A block of the KV cache, and the list of free ones.

The list is doubly linked through the blocks themselves: a shared block must leave it, from
anywhere in the middle, the moment it is hit again. Every operation takes constant time.
vLLM: v1/core/kv_cache_utils.py, KVCacheBlock and FreeKVCacheBlockQueue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. The caller decides whom to preempt."""


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One page: `block_size` consecutive tokens of one sequence, in every layer."""

    block_id: int  # index into the cache tensors
    ref_cnt: int = 0  # how many requests have it in their table
    block_hash: bytes | None = None  # of its tokens and all before, once full and cached
    # Its neighbours in the list of free blocks; None: it is not in the list.
    prev: KVCacheBlock | None = field(default=None, repr=False)
    next: KVCacheBlock | None = field(default=None, repr=False)


class FreeBlockQueue:
    """Free blocks, next to be reused first."""

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free = 0
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)  # always there
        self._head.next, self._tail.prev = self._tail, self._head
        self.append(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the block at the front.

        Raises:
            OutOfBlocks: no block is free.
        """
        block = self._head.next
        if block is None or block is self._tail:
            raise OutOfBlocks("no block is free")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block, wherever in the list it is.

        Raises:
            ValueError: it is not in the list.
        """
        before, after = block.prev, block.next
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not free")
        before.next, after.prev = after, before
        block.prev = block.next = None
        self.num_free -= 1

    def append(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in the order given: they are reused last."""
        for block in blocks:
            self._insert(block, self._tail)

    def prepend(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the front, in the order given: they are reused next."""
        first = self._head.next
        assert first is not None
        for block in blocks:
            self._insert(block, first)

    def _insert(self, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next is not None:
            raise ValueError(f"block {block.block_id} is free already")
        before = after.prev
        assert before is not None
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.num_free += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next
