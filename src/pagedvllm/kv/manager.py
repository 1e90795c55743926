"""The KV-cache manager: a block table for each request, filled from one pool.

Paper: Kwon et al., SOSP 2023, section 4.3. vLLM: v1/core/kv_cache_manager.py, KVCacheManager,
and v1/core/single_type_kv_cache_manager.py, FullAttentionManager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from pagedvllm.kv import invariants
from pagedvllm.kv.block import KVCacheBlock
from pagedvllm.kv.block_pool import BlockPool
from pagedvllm.kv.protocol import InvariantError, blocks_for
from pagedvllm.request import Request


class KVCacheManager:
    """Who holds which blocks.

    Token t of a request is in block table[t // block_size], at place t % block_size.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.pool = self.make_pool(num_blocks)
        self.tables: dict[str, list[KVCacheBlock]] = {}  # of requests that hold blocks
        # (step, blocks) that are free as soon as that step is done
        self.deferred: deque[tuple[int, list[KVCacheBlock]]] = deque()
        self.max_lookahead = 0  # so far: tables may be that much longer than their tokens

    def make_pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def lookup(self, request: Request) -> int:
        """How many of its first tokens are in the cache already; never all of them."""
        return len(self.cached_blocks(request)) * self.block_size

    def cached_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The blocks that hold its first tokens already: none without a prefix cache."""
        return []

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        lookahead: int = 0,
        *,
        whole: int = 0,
        spare: int = 0,
    ) -> list[int] | None:
        """Room for a request's next tokens: all of it, or None and nothing has changed.

        lookahead: room for guesses after the new tokens. whole: refuse unless that many
        tokens of the request would fit. spare: blocks that must stay free.
        Returns the ids of the blocks added. A new table begins with the cached blocks.
        """
        table = self.tables.get(request.request_id)
        cached = self.cached_blocks(request) if table is None else []
        num_held = len(cached) if table is None else len(table)
        num_computed = request.num_computed_tokens or len(cached) * self.block_size
        num_stored = num_computed + num_new_tokens
        missing = blocks_for(num_stored + lookahead, self.block_size) - num_held
        added: list[KVCacheBlock] = []
        if missing > 0 or whole:  # else its last block has room
            missing = max(missing, 0)
            needed = max(missing, blocks_for(whole, self.block_size) - num_held)
            needed += sum(block.ref_cnt == 0 for block in cached)  # free now, and soon not
            if needed + spare > self.num_free_blocks:
                return None
            self.max_lookahead = max(self.max_lookahead, lookahead)
            self.pool.touch(cached)
            added = cached + self.pool.allocate(missing)
            self.tables.setdefault(request.request_id, []).extend(added)
        self.register(request, num_stored)
        return [block.block_id for block in added]

    def register(self, request: Request, num_tokens: int) -> None:
        """This step fills the first `num_tokens`: a prefix cache lets others find them."""

    def free(self, request: Request, until: int = 0) -> None:
        """Take its blocks away: now or, if step `until` uses them, when that is done."""
        blocks = self.tables.pop(request.request_id, [])
        if until:
            self.deferred.append((until, blocks))
        else:
            self.pool.free(blocks)

    def step_done(self, step: int, failed: bool = False) -> None:
        """No batch up to this step is in flight any more: what it used is free again."""
        while self.deferred and self.deferred[0][0] <= step:
            _, blocks = self.deferred.popleft()
            if failed:
                self.discard(blocks)
            self.pool.free(blocks)

    def forget(self, request: Request, num_tokens: int) -> None:
        """Only its first `num_tokens` tokens are in its blocks, whatever was planned."""
        self.discard(
            self.tables.get(request.request_id, [])[num_tokens // self.block_size :]
        )

    def discard(self, blocks: list[KVCacheBlock]) -> None:
        """Nobody should find these blocks: nobody can, without a prefix cache."""

    def block_ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self.tables.get(request_id, ())]

    def check_invariants(self, requests: dict[str, Request]) -> None:
        """Raise InvariantError, naming everything in pool and tables that does not add up."""
        found = list(self.problems(requests))
        if found:
            raise InvariantError("; ".join(found))

    def problems(self, requests: dict[str, Request]) -> Iterator[str]:
        deferred = [blocks for _, blocks in self.deferred]
        yield from invariants.free_list(self.pool)
        yield from invariants.references(self.pool, self.tables, deferred)
        slack = self.max_lookahead
        yield from invariants.tables(self.tables, requests, self.block_size, slack)

    def snapshot(self) -> dict[str, Any]:
        """The pool as a trace shows it."""
        blocks = self.pool.blocks
        return {
            "cached_blocks": [b.block_id for b in blocks if b.block_hash is not None],
            "free_queue": [block.block_id for block in self.pool.free_queue],
            "ref_cnt": {str(b.block_id): b.ref_cnt for b in blocks if b.ref_cnt},
        }
