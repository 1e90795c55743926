"""vLLM 0.30.0's own scheduler and KV-cache manager, driven without a model, in the environment where vLLM is installed.

usage: vllm_oracle.py NAME.workload.json ...      writes NAME.trace.jsonl beside each
       vllm_oracle.py --bench N [--no-caching]    us per schedule() and update_from_output() at N running decodes

It knows nothing of pagedvllm: what the two have in common is the format of tests/golden.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.pop("PYTHONHASHSEED", None)  # vLLM would derive its first hash from it
os.environ |= {"VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V2_MODEL_RUNNER": "0"}  # 0 keeps resumed requests apart

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

DEFAULTS = {
    "num_blocks": 64,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
}
TINY_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50_000,
    "max_position_embeddings": 65_536,
    "torch_dtype": "float32",
}
FIELDS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "policy")
MORE_FIELDS = ("long_prefill_token_threshold", "watermark", "scheduler_reserve_full_isl")


def make_scheduler(limits: dict[str, Any]) -> tuple[Scheduler, Any]:
    """vLLM's scheduler under these limits, and the function that hashes a request's blocks."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY_MODEL))
        model = ModelConfig(
            model=directory, dtype="float32", seed=0, skip_tokenizer_init=True, max_model_len=limits["max_model_len"]
        )
        scheduler = SchedulerConfig(
            is_encoder_decoder=False, async_scheduling=False, **{name: limits[name] for name in FIELDS + MORE_FIELDS}
        )
        cache = CacheConfig(block_size=limits["block_size"], enable_prefix_caching=limits["enable_prefix_caching"])
        config = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache)
    got = {name: getattr(config.scheduler_config, name, None) for name in FIELDS if name != "max_model_len"}
    got |= {"block_size": config.cache_config.block_size, "max_model_len": config.model_config.max_model_len}
    changed = {name: value for name, value in got.items() if value != limits[name]}
    assert not changed, f"vLLM runs under other limits than it was asked to: {changed}"
    spec = FullAttentionSpec(block_size=limits["block_size"], num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = KVCacheConfig(
        num_blocks=limits["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)],
        prefix_cache_retention_interval=0,
    )
    config.cache_config.num_gpu_blocks = limits["num_blocks"]
    size, hash_size = resolve_kv_cache_block_sizes(groups, config)
    made = Scheduler(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=hash_size,
        log_stats=False,
    )
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(hash_size, hash_function) if limits["enable_prefix_caching"] else None
    return made, hasher


def draw(key: str, vocab: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % vocab


def expand(prompt: list[Any]) -> list[int]:
    tokens: list[int] = []
    for part in prompt:
        segment = isinstance(part, dict)
        tokens += [draw(f"p:{part['seed']}:{i}", 50_000) for i in range(part["len"])] if segment else [part]
    return tokens


class Run:
    """One workload, step by step."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.workload = workload
        self.limits = DEFAULTS | {k: v for k, v in workload.get("engine", {}).items() if k in DEFAULTS}
        self.scheduler, self.hasher = make_scheduler(self.limits)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        tokens = workload.get("tokens", {})
        self.mode, self.seed = tokens.get("mode", "per_request"), tokens.get("seed", 0)
        self.vocab = tokens.get("vocab", 50_000)
        self.requests: dict[str, Request] = {}

    def lines(self):
        listed = list(enumerate(self.workload["requests"]))
        pending = sorted(listed, key=lambda pair: (pair[1]["arrival_step"], pair[0]))
        step = 0
        while pending or self.scheduler.has_requests():
            arrived = []
            while pending and pending[0][1]["arrival_step"] <= step:
                arrived.append(self.add(*pending.pop(0)))
            due = [item["id"] for _, item in listed if item.get("abort_step") == step]
            aborted = [name for name in due if name in self.requests and not self.requests[name].is_finished()]
            for name in aborted:
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            if self.scheduler.has_requests():
                yield {"step": step, "arrived": arrived, "aborted": aborted, **self.step()}
            else:
                yield {"step": step, "idle": True}
            step += 1
        yield {"end": True, "steps": step, **self.summary()}

    def add(self, index: int, item: dict[str, Any]) -> str:
        params = SamplingParams(
            max_tokens=item["max_tokens"], ignore_eos=True, stop_token_ids=item.get("stop_token_ids"), temperature=0.0
        )
        request = Request(
            request_id=item["id"],
            prompt_token_ids=expand(item["prompt"]),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(item.get("arrival_time", index)),
            priority=item.get("priority", 0),
            cache_salt=item.get("cache_salt"),
            block_hasher=self.hasher,
        )
        self.requests[item["id"]] = request
        self.scheduler.add_request(request)
        return item["id"]

    def step(self) -> dict[str, Any]:
        before = {name: request.num_preemptions for name, request in self.requests.items()}
        output = self.scheduler.schedule()
        line = self.decisions(output, before)
        ids = list(output.num_scheduled_tokens)
        sampled = [self.sample(name) for name in ids]
        line["sampled"] = {name: tokens[0] for name, tokens in zip(ids, sampled, strict=True) if tokens}
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict={},
        )
        unfinished = [name for name, request in self.requests.items() if not request.is_finished()]
        self.scheduler.update_from_output(output, result)
        ended = [name for name in unfinished if self.requests[name].is_finished()]
        line["finished"] = {name: self.requests[name].status.name for name in ended}
        line["free_after_update"] = self.pool.get_num_free_blocks()
        line["cached_blocks"] = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        if self.workload.get("record_free_queue", True):
            line["free_queue"] = [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]
        line["ref_cnt"] = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt and not b.is_null}
        return line

    def sample(self, name: str) -> list[int]:
        request = self.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        position, last = request.num_tokens, request.all_token_ids[-1]
        key = f"{self.seed}:{name}:{position}" if self.mode == "per_request" else f"{self.seed}:{position}:{last}"
        return [draw(key, self.vocab)]

    def decisions(self, output: Any, before: dict[str, int]) -> dict[str, Any]:
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        pairs = list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True))
        resumed = cached.resumed_req_ids
        manager = self.scheduler.kv_cache_manager
        held = manager.coordinator.single_type_managers[0].req_to_blocks
        return {
            "scheduled": dict(output.num_scheduled_tokens),
            "total": output.total_num_scheduled_tokens,
            "new": [item.req_id for item in new],
            "running": [name for name in cached.req_ids if name not in resumed],
            "resumed": [name for name in cached.req_ids if name in resumed],
            "admitted_computed": {
                **{item.req_id: item.num_computed_tokens for item in new},
                **{name: count for name, count, _ in pairs if name in resumed},
            },
            "preempted": [name for name, request in self.requests.items() if request.num_preemptions > before[name]],
            "preempted_output": sorted(output.preempted_req_ids or []),
            "finished_notified": sorted(output.finished_req_ids),
            "new_block_ids": {
                **{item.req_id: list(item.block_ids[0]) for item in new},
                **{name: list(ids[0]) if ids else [] for name, _, ids in pairs},
            },
            "running_queue": [request.request_id for request in self.scheduler.running],
            "waiting_queue": [request.request_id for request in self.scheduler.waiting],
            "free_after_schedule": self.pool.get_num_free_blocks(),
            "blocks": {name: list(manager.get_block_ids(name)[0]) for name in self.requests if name in held},
        }

    def summary(self) -> dict[str, Any]:
        requests = {
            name: {
                "status": request.status.name,
                "prompt_len": request.num_prompt_tokens,
                "output": list(request.output_token_ids),
                "num_preemptions": request.num_preemptions,
                "num_computed_tokens": request.num_computed_tokens,
            }
            for name, request in self.requests.items()
        }
        return {"requests": requests, "leaked_blocks": self.limits["num_blocks"] - 1 - self.pool.get_num_free_blocks()}


def bench(running: int, caching: bool, steps: int = 200, prompt: int = 128, warm_up: int = 20) -> dict[str, Any]:
    """The same measurement as `pagedvllm bench scheduler`."""
    per_request = (prompt + steps + warm_up + 64) // 16 + 2
    limits = DEFAULTS | {"num_blocks": running * per_request + 16, "enable_prefix_caching": caching}
    limits |= {"max_num_seqs": running, "max_num_batched_tokens": running * prompt, "max_model_len": 32_768}
    scheduler, hasher = make_scheduler(limits)
    for i in range(running):
        scheduler.add_request(
            Request(
                request_id=f"r{i}",
                prompt_token_ids=[(i * 7919 + j) % 50_000 for j in range(prompt)],
                sampling_params=SamplingParams(max_tokens=steps + warm_up + 50, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                arrival_time=float(i),
                block_hasher=hasher,
            )
        )

    def step() -> tuple[int, int]:
        start = time.perf_counter_ns()
        output = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[11] for _ in ids],
            prompt_logprobs_dict={},
        )
        sampled = time.perf_counter_ns()
        scheduler.update_from_output(output, result)
        return scheduled - start, time.perf_counter_ns() - sampled

    for _ in range(1 + warm_up):
        step()
    gc.collect()
    gc.freeze()  # as vLLM's EngineCore does when it has started
    times = [step() for _ in range(steps)]
    gc.unfreeze()
    schedule, update = (median(column) / 1000 for column in zip(*times, strict=True))
    total = median(sum(pair) for pair in times) / 1000
    return {
        "running": running,
        "schedule_us": round(schedule, 1),
        "update_us": round(update, 1),
        "total_us": round(total, 1),
        "us_per_request": round(total / running, 2),
    }


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] == "--bench":
        caching = "--no-caching" not in arguments
        for line in sys.stdin if arguments[1] == "-" else [arguments[1]]:
            print(json.dumps(bench(int(line), caching)), flush=True)
        return
    for name in arguments:
        path = Path(name)
        lines = Run(json.loads(path.read_text())).lines()
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.with_name(path.name.replace(".workload.json", ".trace.jsonl")).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
