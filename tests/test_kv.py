"""Blocks, pool, managers and prefix cache; and the walk over their books, which names whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedvllm.kv.block import FreeBlockQueue, KVCacheBlock, OutOfBlocks
from pagedvllm.kv.block_pool import BlockPool
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.prefix_cache import PrefixCachingManager, hash_block
from pagedvllm.kv.protocol import CountingKVCache, InvariantError, KVCache, blocks_for
from pagedvllm.request import Request
from pagedvllm.sampling_params import SamplingParams


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the free list


def test_free_queue_in_order_and_from_the_middle() -> None:
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = FreeBlockQueue(blocks)
    assert queue.popleft() is blocks[0]
    queue.remove(blocks[3])
    queue.remove(blocks[5])
    queue.append([blocks[0]])
    queue.prepend([blocks[5], blocks[3]])
    assert ids(queue) == [5, 3, 1, 2, 4, 0] and queue.num_free == 6
    with pytest.raises(ValueError, match="block 2 is free already"):
        queue.append([blocks[2]])
    queue.remove(blocks[2])
    with pytest.raises(ValueError, match="block 2 is not free"):
        queue.remove(blocks[2])
    assert ids(queue) == [5, 3, 1, 4, 0]


def test_an_empty_queue_says_so() -> None:
    queue = FreeBlockQueue([])
    with pytest.raises(OutOfBlocks, match="no block is free"):
        queue.popleft()
    assert list(queue) == [] and queue.num_free == 0


# ---------------------------------------------------------------- the pool


def test_pool_takes_all_or_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert ids(pool.allocate(3)) == [1, 2, 3]  # never block 0
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_pool_frees_tail_first_and_hashed_blocks_last() -> None:
    pool = BlockPool(7)
    table = pool.allocate(4)
    table[0].block_hash = table[2].block_hash = b"x"
    pool.free(table)
    assert ids(pool.free_queue) == [4, 2, 5, 6, 3, 1]
    with pytest.raises(ValueError, match="block 4 is freed twice"):
        pool.free(table)


def test_a_shared_block_stays_until_the_last_reference_goes() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.touch(table[:1])
    pool.free(table)
    assert ids(pool.free_queue) == [2, 3] and table[0].ref_cnt == 1
    pool.free(table[:1])
    pool.touch(table[:1])  # from the free list back into use
    assert ids(pool.free_queue) == [2, 3]


# ---------------------------------------------------------------- managers


@pytest.mark.parametrize("kind", [CountingKVCache, KVCacheManager, PrefixCachingManager])
def test_what_every_manager_does(kind: type[KVCache]) -> None:
    kv, request = kind(6, 4), Request("a", list(range(9)))
    assert kv.lookup(request) == 0 and kv.num_free_blocks == 5
    assert len(kv.allocate(request, 9) or []) == 3 and kv.num_free_blocks == 2
    request.num_computed_tokens = 9
    request.token_ids.append(1)
    assert kv.allocate(request, 1) == []  # the last block has room
    assert kv.allocate(request, 12) is None and kv.num_free_blocks == 2 and len(kv.block_ids("a")) == 3
    assert len(kv.allocate(request, 1, lookahead=3) or []) == 1
    other = Request("b", [5] * 4)
    assert kv.allocate(other, 4, spare=1) is None and kv.allocate(other, 4, whole=5) is None
    assert kv.block_ids("b") == [] and kv.num_free_blocks == 1
    kv.check_invariants({"a": request, "b": other})
    kv.free(request, until=3)
    assert kv.num_free_blocks == 1 and kv.block_ids("a") == []
    kv.check_invariants({"b": other})
    kv.step_done(2)
    assert kv.num_free_blocks == 1
    kv.step_done(3)
    kv.free(other)  # holds nothing
    assert kv.num_free_blocks == 5
    kv.check_invariants({"b": other})


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


# ---------------------------------------------------------------- prefix cache


def start(kv: PrefixCachingManager, name: str, tokens: list[int], **kwargs: object) -> tuple[Request, int]:
    """Admit a request as the scheduler does; what it found in the cache."""
    request = Request(name, tokens, **kwargs)  # type: ignore[arg-type]
    hit = kv.lookup(request)
    assert kv.allocate(request, request.num_tokens - hit) is not None
    request.num_computed_tokens = request.num_tokens
    return request, hit


TEXT = list(range(12))


def test_hits_are_whole_blocks_and_leave_one_token() -> None:
    kv = PrefixCachingManager(20, 4)
    start(kv, "a", TEXT)
    assert start(kv, "b", TEXT)[1] == 8  # block-aligned: the last block is computed again
    assert start(kv, "c", [*TEXT, 1])[1] == 12
    assert start(kv, "d", TEXT[:6])[1] == 4
    assert start(kv, "e", [9, *TEXT])[1] == 0
    assert start(kv, "f", TEXT, params=SamplingParams(prompt_logprobs=1))[1] == 0  # wants every prompt token's logits


def test_what_else_the_hash_depends_on() -> None:
    """vLLM issues 30931, 42125, 44701: a salt spelt like an adapter's name, the same adapter loaded again."""
    kv = PrefixCachingManager(60, 4)
    kinds = [{}, {"cache_salt": "1"}, {"lora_id": 1}, {"lora_id": 2}, {"cache_salt": "1", "lora_id": 1}]
    assert [start(kv, f"first {i}", [*TEXT, 0], **kind)[1] for i, kind in enumerate(kinds)] == [0] * 5
    assert [start(kv, f"again {i}", [*TEXT, 0], **kind)[1] for i, kind in enumerate(kinds)] == [12] * 5
    assert hash_block(b"p", [1], (("salt", "1"),)) != hash_block(b"p", [1], (("lora", "1"),))
    assert hash_block(b"p", [1, 2]) != hash_block(b"p", [2, 1]) != hash_block(b"q", [2, 1])


def test_of_two_copies_the_earliest_is_found_and_the_other_survives_it() -> None:
    kv = PrefixCachingManager(7, 4)
    a, _ = start(kv, "a", TEXT[:4])
    b, _ = start(kv, "b", TEXT[:4])  # computed again: nobody may lose his last token
    assert kv.block_ids("a") == [1] and kv.block_ids("b") == [2]
    assert ids(kv.cached_blocks(Request("c", TEXT[:5]))) == [1]
    kv.free(a)
    kv.free(b)
    churn, _ = start(kv, "churn", [7] * 17)  # 5 blocks: 3, 4, 5, 6, 1
    assert kv.block_ids("churn")[-1] == 1
    assert ids(kv.cached_blocks(Request("c", TEXT[:5]))) == [2]
    kv.check_invariants({"churn": churn})


def test_guesses_are_not_announced() -> None:
    kv = PrefixCachingManager(8, 4)
    request, _ = start(kv, "a", TEXT[:6])
    request.token_ids.append(6)
    assert kv.allocate(request, 3) is not None  # token 6 and two guesses: positions 6, 7 and 8
    assert [block.block_hash is not None for block in kv.tables["a"]] == [True, False, False]
    request.token_ids += [7, 8]
    request.num_computed_tokens = 8
    assert kv.allocate(request, 1) == []
    assert [block.block_hash is not None for block in kv.tables["a"]] == [True, True, False]


def test_a_failed_step_takes_its_announcements_back() -> None:
    kv = PrefixCachingManager(20, 4)
    request = Request("a", list(range(20)))
    kv.allocate(request, 9)
    request.num_computed_tokens = 9
    kv.allocate(request, 11)
    assert kv.lookup(Request("b", list(range(21)))) == 20
    kv.forget(request, 9)
    assert kv.lookup(Request("b", list(range(21)))) == 8
    kv.check_invariants({"a": request})
    kv.free(request, until=7)
    kv.step_done(7, failed=True)  # aborted in flight, and then the step failed
    assert kv.lookup(Request("b", list(range(21)))) == 0
    kv.check_invariants({})


# ---------------------------------------------------------------- mutation: every breach is named


def healthy() -> tuple[PrefixCachingManager, dict[str, Request]]:
    kv = PrefixCachingManager(16, 4)
    a, _ = start(kv, "a", [*TEXT, 1])
    b, _ = start(kv, "b", [*TEXT, 2])
    gone, _ = start(kv, "gone", [3] * 9)
    kv.free(gone)
    requests = {"a": a, "b": b}
    kv.check_invariants(requests)
    return kv, requests


def leak(kv: PrefixCachingManager) -> None:
    del kv.tables["a"][-1]


def leak_of_a_free_block(kv: PrefixCachingManager) -> None:
    kv.pool.free_queue.popleft()


def double_free(kv: PrefixCachingManager) -> None:
    kv.pool.free([kv.tables["a"][-1]])


def free_of_a_shared_block(kv: PrefixCachingManager) -> None:
    kv.pool.free(kv.tables["a"][:1])


def stale_hash_in_the_index(kv: PrefixCachingManager) -> None:
    kv.tables["a"][0].block_hash = None


def stale_hash_of_reused_block(kv: PrefixCachingManager) -> None:
    cached = kv.pool.index
    kv.pool.index = {}
    block = kv.pool.free_queue.popleft()
    kv.pool.index = cached
    block.ref_cnt = 1
    kv.pool.register(block, b"what it held before")
    kv.pool.free([kv.tables["b"].pop()])
    kv.tables["b"].append(block)


def hash_of_other_tokens(kv: PrefixCachingManager) -> None:
    block = kv.tables["a"][2]
    kv.pool.forget(block)
    kv.pool.register(block, hash_block(b"other", [1]))


def wrong_table_entry(kv: PrefixCachingManager) -> None:
    kv.tables["b"][-1] = next(iter(kv.pool.free_queue))


def entry_twice(kv: PrefixCachingManager) -> None:
    kv.tables["b"][-1] = kv.tables["b"][0]


def null_block_in_a_table(kv: PrefixCachingManager) -> None:
    kv.tables["b"][-1] = kv.pool.null_block


def wrong_reference_count(kv: PrefixCachingManager) -> None:
    kv.tables["a"][0].ref_cnt += 1


def wrong_free_count(kv: PrefixCachingManager) -> None:
    kv.pool.free_queue.num_free += 1


def broken_link(kv: PrefixCachingManager) -> None:
    third = list(kv.pool.free_queue)[2]
    third.prev = kv.pool.blocks[1]


def table_too_short(kv: PrefixCachingManager) -> None:
    kv.pool.free([kv.tables["a"].pop()])


def table_too_long(kv: PrefixCachingManager) -> None:
    kv.tables["a"] += kv.pool.allocate(1)


def table_of_nobody(kv: PrefixCachingManager) -> None:
    kv.tables["nobody"] = kv.pool.allocate(1)


@pytest.mark.parametrize(
    ("mutate", "named"),
    [
        (leak, r"leak: block \d+ has ref_cnt 1, but is held by nobody"),
        (leak_of_a_free_block, r"leak: block \d+ is neither free nor held"),
        (double_free, r"double free: block 4 is free, with ref_cnt 0 and held by \['a'\]"),
        (
            free_of_a_shared_block,
            r"double free or wrong table entry: block 1 has ref_cnt 1, but is held by \['a', 'b'\]",
        ),
        (stale_hash_in_the_index, r"stale hash: block 1 is in the index under another hash"),
        (stale_hash_of_reused_block, r"stale hash: 'b'\[3\], block \d+, is named after tokens that it does not hold"),
        (hash_of_other_tokens, r"stale hash: 'a'\[2\], block 3, is named after tokens that it does not hold"),
        (wrong_table_entry, r"wrong table entry: block \d+ has ref_cnt 0, but is held by \['b'\]"),
        (entry_twice, r"wrong table entry: 'b' has a block twice"),
        (null_block_in_a_table, r"wrong table entry: 'b'\[3\] is block 0"),
        (wrong_reference_count, r"leak: block 1 has ref_cnt 3, but is held by \['a', 'b'\]"),
        (wrong_free_count, r"free list: it has \d+ blocks, num_free says \d+"),
        (broken_link, r"free list: block \d+ does not point back to block \d+"),
        (table_too_short, r"wrong count: 'a' has 3 blocks of 4; its 13 computed of 13 tokens need 4 to 4"),
        (table_too_long, r"wrong count: 'a' has 5 blocks of 4"),
        (table_of_nobody, r"leak: 'nobody' is gone, but still has a table"),
    ],
)
def test_invariants_name_the_breach(mutate: Callable[[PrefixCachingManager], None], named: str) -> None:
    kv, requests = healthy()
    mutate(kv)
    with pytest.raises(InvariantError, match=named):
        kv.check_invariants(requests)


def test_invariants_name_a_wrong_count_of_the_counting_manager() -> None:
    kv = CountingKVCache(6, 4)
    kv.allocate(Request("a", [1] * 5), 5)
    kv.num_free_blocks += 1
    with pytest.raises(InvariantError, match=r"2 blocks held \+ 4 free is not 5"):
        kv.check_invariants({})
