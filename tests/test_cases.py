"""Faults that users of engines of this kind have reported: those that need only requests, scheduler, memory and pages.

"Same" means: the same tokens as an uncached, unchunked run of that request alone. Each test also shows that what it is
about did happen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedvllm import LLM, SamplingParams
from pagedvllm.kv.manager import KVCacheManager
from pagedvllm.kv.prefix_cache import PrefixCachingManager
from pagedvllm.request import Request
from tests.conftest import save_checkpoint
from tests.engines import ENGINES, holder_of, scheduler_of
from tests.test_scheduler import Engine

GREEDY = {"temperature": 0.0, "ignore_eos": True}
Make = Callable[..., tuple[LLM, Any]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    path = tmp_path_factory.mktemp("cases")
    save_checkpoint(path, "llama")
    for file in embedded.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module", params=list(ENGINES))
def make(tiny: Path, request: pytest.FixtureRequest) -> Make:
    """An LLM on each engine that schedules, and its scheduler."""

    def made(**settings: Any) -> tuple[LLM, Any]:
        chosen = ENGINES.get(settings.get("engine", request.param), {})
        llm = LLM(str(tiny), **{**chosen, "scheduler_cls": "recording", **settings})
        return llm, scheduler_of(llm)

    return made


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Callable[[list[int], int], list[int]]:
    """The reference's tokens for one prompt."""
    reference = LLM(str(tiny), engine="recompute")

    def run(prompt: list[int], max_tokens: int) -> list[int]:
        (output,) = reference.generate(prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))
        return output.outputs[0].token_ids

    return run


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, **GREEDY))
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def hits(scheduler: Any) -> int:
    return sum(sum(line["admitted_computed"].values()) for line in scheduler.trace)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("longest", [None, 64])
def test_a_lone_sequence_outgrows_the_pool(make: Make, alone: Any, longest: int | None, caching: bool) -> None:
    """nano-vllm 274, 277: assertion, or endless retry."""
    settings = {"engine": "paged"} if longest else {}  # the others do not start with a length that cannot fit
    llm, scheduler = make(
        block_size=4, num_gpu_blocks_override=3, max_model_len=longest, enable_prefix_caching=caching, **settings
    )
    params = SamplingParams(max_tokens=4, **GREEDY)
    first, second, third = llm.generate([[1] * 3, [2] * 8, [3] * 4], params)
    assert second.finished and second.outputs[0].finish_reason == "error"
    if longest is None:  # then the limit is what the pool holds: refused before it starts
        assert "max_model_len 8 at most 7" in (second.error or "")
    else:
        assert second.error == "the request has grown to 9 tokens; the KV cache holds 8"
        assert second.outputs[0].token_ids == alone([2] * 8, 1)
    assert first.outputs[0].token_ids == alone([1] * 3, 4) and third.outputs[0].token_ids == alone([3] * 4, 4)
    assert scheduler.kv.num_free_blocks == 2 and not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", [KVCacheManager, PrefixCachingManager])
@pytest.mark.parametrize("whole", [False, True])
def test_one_that_outgrows_the_pool_while_others_run(kind: Any, whole: bool) -> None:
    engine = Engine(num_blocks=5, kind=kind, scheduler_reserve_full_isl=whole)
    engine.add("small", [1] * 2, max_tokens=6)
    big = engine.add("big", [2] * 8, max_tokens=30)
    engine.add("after", [3] * 5, max_tokens=8)
    engine.run()
    assert big.num_preemptions > 0 and big.num_tokens == 17
    assert engine.errors == {"big": "the request has grown to 17 tokens; the KV cache holds 16"}
    assert [engine.seen[name].num_output_tokens for name in ("small", "after")] == [6, 8]


def test_a_prompt_larger_than_the_pool(make: Make, alone: Any) -> None:
    """vLLM 2163, 35570: it waits for ever, and everybody behind it."""
    with pytest.raises(
        ValueError, match="max_model_len 64 does not fit: the KV cache has 2 blocks of 4 tokens, 8 in all"
    ):
        make(engine="default", block_size=4, num_gpu_blocks_override=3, max_model_len=64)
    llm, scheduler = make(engine="paged", block_size=4, num_gpu_blocks_override=3, max_model_len=64)
    first, second = llm.generate([[1] * 20, [2] * 3], SamplingParams(max_tokens=4, **GREEDY))
    assert first.outputs[0].finish_reason == "error"
    assert first.error == "the prompt has 20 tokens; the whole KV cache holds 8"
    assert second.outputs[0].token_ids == alone([2] * 3, 4)
    assert scheduler.trace[0]["finished"] == {"0": "FINISHED_ERROR"}


def test_a_hash_must_not_outlive_its_block(make: Make, alone: Any) -> None:
    """nano-vllm 163."""
    llm, scheduler = make(block_size=4, num_gpu_blocks_override=6)
    text = list(range(10, 19))
    assert generate(llm, [text]) == [alone(text, 4)]
    assert generate(llm, [text]) == [alone(text, 4)] and hits(scheduler) == 8
    generate(llm, [[i] * 12 for i in range(3, 8)])  # churn
    assert generate(llm, [text]) == [alone(text, 4)] and hits(scheduler) == 8
    scheduler.check_invariants()


def test_a_full_hit_still_computes_a_token(make: Make, alone: Any) -> None:
    """nano-vllm 144, 199: prefill of length zero."""
    llm, scheduler = make(block_size=4)
    text = list(range(20, 28))
    for _ in range(2):
        assert generate(llm, [text]) == [alone(text, 4)]
    assert [line["scheduled"] for line in scheduler.trace if line["new"]] == [{"0": 8}, {"1": 4}] and hits(
        scheduler
    ) == 4


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 4}, {"long_prefill_token_threshold": 3}])
def test_a_chunk_attends_to_what_is_computed_only(make: Make, alone: Any, limits: dict[str, int]) -> None:
    """nano-vllm 212, 213: the length of K taken as that of the whole prompt."""
    llm, scheduler = make(block_size=4, **limits)
    text = list(range(30, 40))
    assert generate(llm, [text]) == [alone(text, 4)]
    chunks = [line["scheduled"]["0"] for line in scheduler.trace][:3]
    assert chunks in ([4, 4, 2], [3, 3, 3]) and not scheduler.trace[0]["sampled"]


def test_identical_prompts_in_one_step(make: Make, alone: Any) -> None:
    """nano-vllm 219: two copies of a block; the index must survive the eviction of either."""
    llm, scheduler = make(block_size=4, num_gpu_blocks_override=9)
    text = list(range(40, 48))
    assert generate(llm, [text, text]) == [alone(text, 4)] * 2
    assert len(scheduler.trace[0]["new"]) == 2 and scheduler.trace[0]["admitted_computed"] == {"0": 0, "1": 4}
    copies = [len(c) for c in scheduler.kv.pool.index.values()]
    assert max(copies) == 2
    for churn in range(3, 9):
        generate(llm, [[churn] * 9])
        scheduler.check_invariants()
        assert generate(llm, [text]) == [alone(text, 4)]
    assert hits(scheduler) > 4


def test_a_matched_block_is_not_evicted() -> None:
    """mini-sglang 46: match, hold, evict under pressure."""
    engine = Engine(num_blocks=7)
    engine.add("a", list(range(9)), max_tokens=1)
    engine.run()
    holder = engine.add("b", list(range(9)), max_tokens=8)
    engine.step()
    assert holder.num_cached_tokens == 8
    for i in range(4):
        engine.add(f"pressure {i}", [50 + i] * 10, max_tokens=2)
    least = 99
    while engine.scheduler.has_requests():
        engine.step()  # the worker checks every row that is read
        least = min(least, engine.kv.num_free_blocks)
        if not holder.finished:
            assert engine.kv.block_ids("b")[:2] == [1, 2]
    assert holder.num_output_tokens == 8 and holder.num_preemptions == 0 and least == 0


def test_the_longest_sequence_is_no_longer_than_the_pool(make: Make) -> None:
    """mini-sglang 68: rounded up past it."""
    llm, _ = make(block_size=1, num_gpu_blocks_override=34)
    assert llm.engine.max_model_len == 33
    (output,) = llm.generate([[1] * 32], SamplingParams(max_tokens=9, **GREEDY))
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
    assert make(block_size=8, num_gpu_blocks_override=5)[0].engine.max_model_len == 32


def test_blocks_come_back(make: Make) -> None:
    """MinivLLM 70: never freed."""
    llm, scheduler = make(block_size=4, num_gpu_blocks_override=20)
    for i in range(100):
        generate(llm, [[i % 90 + 3, 5]], max_tokens=3)
        assert scheduler.kv.num_free_blocks == 19
    scheduler.check_invariants()


def test_exactly_as_many_tokens_as_asked_for(make: Make, alone: Any) -> None:
    """MinivLLM 6: the counter does not grow; mini-sglang 126: the reason is always "stop"."""
    llm, _ = make()
    (output,) = llm.generate([[7, 8]], SamplingParams(max_tokens=3, **GREEDY))
    assert output.outputs[0].token_ids == alone([7, 8], 3) and output.outputs[0].finish_reason == "length"
    stop = alone([7, 8], 3)[1]
    (output,) = llm.generate([[7, 8]], SamplingParams(max_tokens=9, stop_token_ids=[stop], **GREEDY))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    """nano-vllm 73: starvation."""
    engine = Engine(num_blocks=200, max_model_len=400, max_num_batched_tokens=16)
    engine.add("A", [1] * 3, max_tokens=60)
    engine.step()
    engine.add("long", list(range(320)), max_tokens=2)
    steps = 0
    while engine.seen["long"].num_output_tokens == 0:
        output = engine.step()
        steps += 1
        assert output.num_scheduled_tokens["A"] == 1 and output.num_scheduled_tokens["long"] <= 15
    assert steps == -(-320 // 15)


def test_victims_come_back_in_order() -> None:
    """swiftLLM 6: r4 and r3 are preempted in one step; r3 resumes first."""
    engine = Engine(num_blocks=10, kind=KVCacheManager)
    for i, length in enumerate([8, 8, 8, 4, 4]):
        engine.add(f"r{i}", [i + 1] * length, max_tokens=20)
    preempted: list[list[str]] = []
    order: list[str] = []
    while engine.scheduler.has_requests():
        output = engine.step()
        if output.preempted_req_ids:
            preempted.append(output.preempted_req_ids)
        order += output.resumed_req_ids
    assert preempted[0] == ["r4", "r3"]
    assert order.index("r3") < order.index("r4")


def test_recompute_after_preemption_feeds_all_tokens(make: Make, alone: Any) -> None:
    """nano-vllm 145 (here with one rank): only the last token is sent on the second prefill."""
    llm, scheduler = make(block_size=4, num_gpu_blocks_override=8, enable_prefix_caching=False)
    prompts = [[i] * 9 for i in (3, 4, 5)]
    assert generate(llm, prompts, 9) == [alone(p, 9) for p in prompts]
    resumed = [line["scheduled"][name] for line in scheduler.trace for name in line["resumed"]]
    assert resumed and min(resumed) > 9


def test_positions_are_contiguous(make: Make, alone: Any) -> None:
    """nano-vllm 67: a decode position off by one, silently."""
    llm, scheduler = make(block_size=4, num_gpu_blocks_override=30, max_num_batched_tokens=3)
    seen: list[int] = []
    hook = holder_of(llm).model.register_forward_pre_hook(lambda module, args: seen.extend(args[1].positions.tolist()))
    assert generate(llm, [[9, 8, 7, 6, 5]]) == [alone([9, 8, 7, 6, 5], 4)]
    hook.remove()
    assert seen == list(range(8)) and len(scheduler.trace) == 5


def test_no_sharing_across_salts(tiny: Path) -> None:
    """vLLM 30931, 42125, 44701 through the scheduler; the hash itself is tested in test_kv."""
    engine = Engine()
    for i, kind in enumerate([{}, {"cache_salt": "1"}, {"lora_id": 1}, {"lora_id": 2}]):
        for copy in range(2):
            request = engine.add(f"{i}{copy}", list(range(9)), max_tokens=1, **kind)
            engine.run()
            assert request.num_cached_tokens == 8 * copy


def test_an_empty_prompt_and_a_misspelt_option(make: Make) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        make()[0].generate("")
    with pytest.raises(TypeError, match="unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        make(max_num_seq=4)
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        Request("a", [])
