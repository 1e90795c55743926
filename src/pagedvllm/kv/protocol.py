"""What the scheduler asks of memory, and the least that can answer: one that only counts.

vLLM: v1/core/kv_cache_manager.py, KVCacheManager (get_computed_blocks, allocate_slots).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from pagedvllm.request import Request


class KVCache(Protocol):
    """Memory in blocks of `block_size` tokens.

    Block 0 is never handed out: it is where padding may point.
    """

    block_size: int
    num_blocks: int

    def __init__(self, num_blocks: int, block_size: int) -> None: ...

    @property
    def num_free_blocks(self) -> int: ...

    def lookup(self, request: Request) -> int:
        """How many of its first tokens, never all, need no computing if admitted now."""
        ...

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

        A request that holds nothing yet begins with the blocks that `lookup` counted.
        lookahead: room for guesses after the new tokens. whole: also refuse unless that
        many tokens of the request would fit. spare: blocks that must stay free.
        Returns the ids of the blocks that its table has grown by.
        """
        ...

    def free(self, request: Request, until: int = 0) -> None:
        """Take its blocks away: now, or once step `until`, which uses them, is done."""
        ...

    def step_done(self, step: int, failed: bool = False) -> None:
        """No batch up to this step is in flight. failed: what it should write is missing."""
        ...

    def forget(self, request: Request, num_tokens: int) -> None:
        """Only its first `num_tokens` tokens are in the cache, whatever was planned."""
        ...

    def block_ids(self, request_id: str) -> list[int]:
        """The block table of a request; [] if it holds nothing."""
        ...

    def check_invariants(self, requests: dict[str, Request]) -> None:
        """Raise InvariantError, with what is wrong, unless all blocks are accounted for."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """What a trace shows of the memory besides the tables."""
        ...


class InvariantError(AssertionError):
    """The engine's own books do not add up. The message lists everything that is wrong."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the last one may be partly empty."""
    return -(-num_tokens // block_size)


class CountingKVCache:
    """Knows how many blocks are free, not which: enough for all decisions of the scheduler.

    Block ids are all -1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_free_blocks = num_blocks - 1  # as if there were a block 0
        self._held: dict[str, int] = {}
        self._deferred: deque[tuple[int, int]] = (
            deque()
        )  # (step, blocks): then they are free

    def lookup(self, request: Request) -> int:
        return 0

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        lookahead: int = 0,
        *,
        whole: int = 0,
        spare: int = 0,
    ) -> list[int] | None:
        held = self._held.get(request.request_id, 0)
        num_tokens = request.num_computed_tokens + num_new_tokens + lookahead
        missing = max(blocks_for(num_tokens, self.block_size) - held, 0)
        needed = max(missing, blocks_for(whole, self.block_size) - held)
        if needed + spare > self.num_free_blocks:
            return None
        self._held[request.request_id] = held + missing
        self.num_free_blocks -= missing
        return [-1] * missing

    def free(self, request: Request, until: int = 0) -> None:
        held = self._held.pop(request.request_id, 0)
        if until:
            self._deferred.append((until, held))
        else:
            self.num_free_blocks += held

    def step_done(self, step: int, failed: bool = False) -> None:
        while self._deferred and self._deferred[0][0] <= step:
            self.num_free_blocks += self._deferred.popleft()[1]

    def forget(self, request: Request, num_tokens: int) -> None:
        pass

    def block_ids(self, request_id: str) -> list[int]:
        return [-1] * self._held.get(request_id, 0)

    def check_invariants(self, requests: dict[str, Request]) -> None:
        held = sum(self._held.values()) + sum(blocks for _, blocks in self._deferred)
        free, usable = self.num_free_blocks, self.num_blocks - 1
        if held + free != usable:
            raise InvariantError(f"{held} blocks held + {free} free is not {usable}")

    def snapshot(self) -> dict[str, Any]:
        return {}
