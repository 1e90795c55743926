"""Lab 6: KV blocks from a config.json, a deployment of the right size, and starts that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from pagedvllm.kv.protocol import blocks_for
from pagedvllm.teach.labs import Case, Task

GIB = 2**30

# ---------------------------------------------------------------- 6.1 from a config.json to blocks

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA2 = {  # 7B: every query head has keys and values of its own
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
ONE_KV_HEAD = {**LLAMA2, "num_key_value_heads": 1, "dtype": "float32"}  # newer files say `dtype`
del ONE_KV_HEAD["torch_dtype"]


def right_numbers(config: Mapping[str, Any], available: int, block_size: int) -> tuple[int, int, int]:
    """(bytes per token, blocks, tokens that can be stored), with the engine's own config."""
    from pagedvllm.model.config import DecoderConfig

    size = {"float32": 4, "float16": 2, "bfloat16": 2}[config.get("torch_dtype") or config["dtype"]]
    per_token = DecoderConfig.from_dict(dict(config)).kv_bytes_per_token(size)
    blocks = available // (per_token * block_size)
    return per_token, blocks, max(0, blocks - 1) * block_size


def _numbers_case(note: str, config: Mapping[str, Any], available: int, block_size: int) -> Case:
    def check(got: Any, config: Mapping[str, Any], available: int, block_size: int) -> str:
        if not isinstance(got, (tuple, list)) or len(got) != 3:
            return f"expected three numbers, got {got!r}"
        names = ("bytes per token", "blocks", "tokens")
        for name, value, right in zip(names, got, right_numbers(config, available, block_size), strict=True):
            if isinstance(value, bool) or not isinstance(value, Integral):
                return f"{name} must be an integer, got {value!r}"
            if value != right:
                return f"{name}: expected {right}, got {value}"
        return ""

    return Case(lambda: (dict(config), available, block_size), note=note, check=check)


NUMBERS_CASES = [
    _numbers_case("SmolLM2 135M in 1 GiB", SMOLLM2, GIB, 16),
    _numbers_case("Qwen3 0.6B, whose heads are 128 wide", QWEN3, 10 * GIB, 16),
    _numbers_case("Llama 2 7B, which does not say how many KV heads it has", LLAMA2, 8 * GIB, 16),
    _numbers_case("one KV head for all, fp32", ONE_KV_HEAD, GIB, 32),
    _numbers_case("not a byte too much", SMOLLM2, 2 * 23040 * 16 - 1 + 23040 * 16, 16),
    _numbers_case("blocks of one token", QWEN3, 3 * 114688, 1),
    _numbers_case("less than a block", SMOLLM2, 23040 * 16 - 1, 16),
]

# ---------------------------------------------------------------- 6.2 the size of a deployment

HIGHEST_SHARE = 0.95  # the house's rules
FEWEST_TOKENS = 2048


@dataclass(frozen=True)
class Job:
    """All users ask at the same moment. prompt, answer: tokens of the longest request."""

    model: str
    gpu: str
    users: int
    prompt: int
    answer: int
    dtype: str = "bfloat16"


def plan_of(job: Job, settings: Mapping[str, Any]) -> Any:
    """The engine's formula for one card."""
    from pagedvllm.teach.memory_plan import plan

    return plan(job.model, job.gpu, dtype=job.dtype, **settings)


def tightest(job: Job, cards: int) -> dict[str, Any]:
    """The settings that leave the most room for the cache and can still serve everybody."""
    return {
        "max_num_seqs": -(-job.users // cards),
        "max_num_batched_tokens": max(FEWEST_TOKENS, -(-job.users // cards)),
        "max_model_len": job.prompt + job.answer,
        "gpu_memory_utilization": HIGHEST_SHARE,
    }


def blocks_needed(job: Job, cards: int, block_size: int = 16) -> int:
    """By the busiest card, when all its requests are at their end. The last token is never stored."""
    return -(-job.users // cards) * blocks_for(job.prompt + job.answer - 1, block_size)


def fewest_cards(job: Job) -> int:
    cards = 1
    while plan_of(job, tightest(job, cards)).num_blocks - 1 < blocks_needed(job, cards):
        cards += 1
    return cards


def replay_card(job: Job, cards: int, num_blocks: int, settings: Mapping[str, Any]) -> tuple[int, int]:
    """(preemptions, most requests that wait for a seat or for memory) on the busiest card.

    Who waits though the step has tokens left waits for one of the two.
    """
    from pagedvllm.teach.memory import trace_of

    users = -(-job.users // cards)
    limits = {name: settings[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    trace = trace_of("plain", [(job.prompt, job.answer)] * users, num_blocks=num_blocks, **limits)[:-1]
    budget = settings["max_num_batched_tokens"]
    waiting = max((len(line["waiting_queue"]) for line in trace if line["total"] < budget), default=0)
    return sum(len(line["preempted"]) for line in trace), waiting


KEYS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization")


def _wrong_form(got: Any, job: Job) -> str:
    """What the house's rules say against an answer, "" if nothing."""
    if not isinstance(got, dict) or got.keys() != {"cards", *KEYS}:
        return f"expected a dict with the keys cards, {', '.join(KEYS)}; got {got!r}"
    whole = [name for name in ("cards", *KEYS[:3]) if type(got[name]) is not int or got[name] < 1]
    if whole:
        return f"{whole[0]} must be a whole number from 1 on, got {got[whole[0]]!r}"
    share = got["gpu_memory_utilization"]
    if not isinstance(share, (int, float)) or not share > 0:
        return f"gpu_memory_utilization must be a number above 0, got {share!r}"
    if share > HIGHEST_SHARE:
        return f"gpu_memory_utilization {share} is more than the house allows, {HIGHEST_SHARE}"
    if got["max_num_batched_tokens"] < FEWEST_TOKENS:
        return f"max_num_batched_tokens {got['max_num_batched_tokens']} is less than the house's {FEWEST_TOKENS}"
    if got["max_model_len"] < job.prompt + job.answer:
        return f"a request of {job.prompt} + {job.answer} tokens is longer than max_model_len {got['max_model_len']}"
    return ""


def check_size(got: Any, job: Job) -> str:
    """Does it start, does it serve everybody at once, and would fewer cards do?"""
    from pagedvllm.teach.memory_plan import PROBLEMS

    if wrong := _wrong_form(got, job):
        return wrong
    settings = {name: got[name] for name in KEYS}
    plan = plan_of(job, settings)
    if plan.problem:
        return f"the engine does not start: {PROBLEMS[plan.problem]}"
    users = -(-job.users // got["cards"])
    if got["max_num_seqs"] < users:
        return f"max_num_seqs is {got['max_num_seqs']}, but {users} users share the busiest card"
    preempted, waiting = replay_card(job, got["cards"], plan.num_blocks, settings)
    if preempted or waiting:
        return (
            f"{_cards(got['cards'])} of {plan.num_blocks} blocks: {preempted} preemptions, and up to {waiting} requests"
            " wait while others run"
        )
    if got["cards"] > (fewest := fewest_cards(job)):
        best = plan_of(job, tightest(job, fewest)).num_blocks
        return f"{_cards(fewest)} can do it (each may have {best} blocks), you pay for {got['cards']}"
    return ""


def _cards(count: int) -> str:
    return f"{count} card" + "s" * (count > 1)


def _size_case(note: str, job: Job) -> Case:
    return Case((job,), note=note, check=check_size)


JOBS = {
    "a team": Job("Llama-3.1-8B", "L4 24 GB", users=40, prompt=1037, answer=100),
    "a department": Job("Llama-3.1-8B", "L4 24 GB", users=150, prompt=600, answer=100),
    "long documents": Job("Qwen3-0.6B", "T4 16 GB", users=3, prompt=30000, answer=50, dtype="float16"),
    "to the last block": Job("Llama-3.1-8B", "L4 24 GB", users=2, prompt=22832, answer=17),
    "large model, few users": Job("Llama-3.1-70B", "H200 141 GB", users=10, prompt=500, answer=60),
}
SIZE_CASES = [_size_case(name, job) for name, job in JOBS.items()]

# ---------------------------------------------------------------- 6.3 starts that are refused


@dataclass(frozen=True)
class Situation:
    """A start on a card of `card` GiB (0: on this computer's CPU) that is refused; one change of setting mends it."""

    says: str  # what has to stay true
    settings: Mapping[str, Any]
    card: float
    others: float = 0.0  # GiB that somebody else holds
    seats: int = 1  # max_num_seqs may not be less
    tokens: int = 0  # that the cache must be able to store
    longest: int = 1  # request, in tokens

    def start(self, **changed: Any) -> Any:
        """The engine core. Raises what the engine raises. A setting that is None is not made."""
        from contextlib import nullcontext

        from pagedvllm.config import EngineConfig
        from pagedvllm.engine.core import EngineCore
        from pagedvllm.teach import start

        base = {"load_format": "dummy", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 8}
        base |= {"model": start.cut_model(), "device": "cpu", "runner_cls": "simple", "enable_prefix_caching": False}
        settings = base | dict(self.settings) | changed
        made = {name: value for name, value in settings.items() if value is not None}
        config = EngineConfig.create(**made)
        with start.pretend_gpu(int(self.card * GIB), int(self.others * GIB)) if self.card else nullcontext():
            return EngineCore(config)

    def refusal(self) -> str:
        """What the engine says."""
        try:
            self.start()
        except ValueError as error:
            return str(error)
        raise AssertionError("this start was meant to be refused")


SITUATIONS = {
    "A": Situation("The neighbour's training run must go on. Store at least 2,000 tokens.", {}, 0.4, 0.1, 8, 2000),
    "B": Situation(
        "Eight run at a time. No request is longer than 4,000 tokens.",
        {"max_model_len": 8000, "max_num_batched_tokens": 8},
        card=0.18,
        seats=8,
        tokens=4000,
        longest=4000,
    ),
    "C": Situation("There is no larger card.", {"max_model_len": 512}, card=0.12, seats=8, tokens=512),
    "D": Situation(
        "At the busiest hour 12 requests run at a time.",
        {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 512},
        card=0.2,
        seats=12,
        tokens=1000,
    ),
    "E": Situation(
        "Copied from another machine. Store at least 10,000 tokens.",
        {"kv_cache_memory_bytes": 200_000_000, "max_model_len": 2048},
        card=0.2,
        seats=8,
        tokens=10000,
    ),
    "F": Situation(
        "A laptop without a GPU. Store at least 4,000 tokens.",
        {"gpu_memory_utilization": 0.5, "max_model_len": 512},
        card=0,
        tokens=4000,
    ),
}


def check_mended(got: Any, name: str) -> str:
    """Start it with the change, and look whether what had to stay true is true."""
    situation = SITUATIONS[name]
    change = got.get(name) if isinstance(got, dict) else None
    if not isinstance(change, dict) or len(change) != 1:
        return f'expected {{"{name}": {{setting: value}}}} with one setting, got {change!r}'
    (setting, value) = next(iter(change.items()))
    if setting in ("model", "load_format", "device", "num_gpu_blocks_override", "worker_cls"):
        return f"{setting} is not yours to change"
    try:
        core = situation.start(**change)
    except (ValueError, TypeError) as error:
        return f"with {setting} {value!r} it is still refused: {error}"
    seats, tokens = core.scheduler.max_num_seqs, core.scheduler.capacity
    if seats < situation.seats:
        return f"only {seats} can run at a time"
    if core.max_model_len < situation.longest:
        return f"it starts, but a request of {situation.longest} tokens is longer than max_model_len"
    if tokens < situation.tokens:
        return f"it starts, but stores only {tokens} tokens"
    return ""


MENDED_CASES = [Case(check=partial(check_mended, name=name), note=f"start {name}") for name in SITUATIONS]

# ---------------------------------------------------------------- the lab

TASKS = {
    "6.1": Task("From a config.json to blocks", NUMBERS_CASES),
    "6.2": Task("The size of a deployment", SIZE_CASES),
    "6.3": Task("Six refused starts", MENDED_CASES),
}
