"""The pool of KV-cache blocks: who owns which page of the cache.

Paper: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4. vLLM: v1/core/block_pool.py, BlockPool.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedvllm.kv.block import FreeBlockQueue, KVCacheBlock, OutOfBlocks


class BlockPool:
    """All blocks of one device, and which of them are free."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (0 is not used), got {num_blocks}"
            )
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]  # never handed out: where padding points
        self.free_queue = FreeBlockQueue(self.blocks[1:])

    @property
    def num_free(self) -> int:
        return self.free_queue.num_free

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` free blocks, all or none.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {self.num_free} free")
        taken = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each block. One that was free leaves the free list."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give up one reference to each block of a request, in table order.

        Raises:
            ValueError: a block has no reference to give up.
        """
        released = []  # tail first: what others may share is the start: reused last
        for block in reversed(blocks):
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                released.append(block)
        # Without a hash nobody can find it again: to the front, ahead of anything of value.
        self.free_queue.prepend([b for b in released if b.block_hash is None])
        self.free_queue.append([b for b in released if b.block_hash is not None])
