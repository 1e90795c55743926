"""The same decisions as vLLM 0.30.0, field by field, on recorded traces; and what becomes of bad workload files."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from pagedvllm.cli import main
from pagedvllm.replay import make_scheduler, replay
from pagedvllm.workload import load, parse
from tests.parity.compare import differences
from tests.parity.draw import draw

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.workload.json"))
IDS = [path.name.removesuffix(".workload.json") for path in GOLDEN]
BLOCK_FIELDS = frozenset({"new_block_ids", "blocks", "cached_blocks", "free_queue", "ref_cnt"})


@pytest.mark.parametrize("path", GOLDEN, ids=IDS)
def test_same_trace_as_vllm(path: Path) -> None:
    assert differences(path, check=True) == ""


@pytest.mark.parametrize("path", [p for p in GOLDEN if p.name[0] == "n"], ids=lambda p: p.name[:3])
def test_a_manager_that_only_counts_makes_the_same_decisions(path: Path) -> None:
    assert differences(path, check=True, kv_manager="counting", skip=BLOCK_FIELDS) == ""


def test_the_golden_traces_hold_what_they_are_to_test() -> None:
    names = {name[0] for name in IDS}
    texts = [Path(str(path).replace("workload.json", "trace.jsonl")).read_text() for path in GOLDEN]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert names == {"n", "r", "w"} and len(GOLDEN) >= 36
    assert sum(len(line.get("preempted", ())) for line in lines) > 90
    assert sum(any(line.get("admitted_computed", {}).values()) for line in lines) > 90
    assert sum(bool(line.get("aborted")) for line in lines) > 8
    assert sum(line.get("idle", False) for line in lines) > 20


def test_a_changed_decision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: each of these rules is needed by some golden trace."""
    from pagedvllm.kv.block_pool import BlockPool
    from pagedvllm.sched.policy import FCFSQueue, PriorityQueue

    def free_head_first(pool: BlockPool, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
        pool.free_queue.append([b for b in blocks if b.ref_cnt == 0])

    changes: list[tuple[type, str, Any]] = [
        (BlockPool, "free", free_head_first),
        (FCFSQueue, "victim", lambda self, running: 0),
        (FCFSQueue, "put_back", FCFSQueue.add),
        (PriorityQueue, "victim", lambda self, running: len(running) - 1),
    ]
    for owner, name, change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, change)
            assert any(differences(path) for path in GOLDEN), f"nobody notices another {owner.__name__}.{name}"


def test_all_traces_at_two_thousand_steps_a_second() -> None:
    workloads = [load(path) for path in GOLDEN if path.name[0] != "r"]
    best = 0.0
    for _ in range(3):  # the machine may be busy with something else
        start, steps = time.perf_counter(), 0
        for workload in workloads:
            for line in replay(workload):
                json.dumps(line, separators=(",", ":"))
                steps += 1
        best = max(best, steps / (time.perf_counter() - start))
    assert best > 2000, f"{best:.0f} steps/s"


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_random_requests_keep_the_books(seed: int) -> None:
    data = draw(900 + seed)
    # Without arrival times of their own: two requests of one rank preempt each other for ever, in vLLM too.
    copies = [dict(r, id=f"{r['id']}_{i}", arrival_time=None) for i in range(8) for r in data["requests"]]
    data["requests"] = copies[:200]
    *_, end = replay(parse(data), check=True)
    assert end["leaked_blocks"] == 0 and len(end["requests"]) == 200
    assert all(request["status"].startswith("FINISHED") for request in end["requests"].values())


BASE: dict[str, Any] = {
    "name": "x",
    "engine": {"num_blocks": 8, "block_size": 4, "max_model_len": 28},
    "tokens": {"mode": "content"},
    "requests": [{"id": "a", "arrival_step": 0, "prompt": [1, {"seed": 1, "len": 4}], "max_tokens": 3}],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    target: Any = data
    for name in parents:
        target = target[int(name) if name.isdigit() else name]
    if value is KeyError:
        del target[last]
    else:
        target[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("engine.groups", ["mamba", "full"], r"engine\.groups must be \['full'\]"),
        ("engine.max_num_seq", 4, r"engine\.max_num_seq is unknown; did you mean 'max_num_seqs'\?"),
        ("engine.max_num_seqs", 0, r"engine\.max_num_seqs must be at least 1, got 0"),
        ("engine.num_blocks", 1, r"engine\.num_blocks must be at least 2"),
        ("engine.block_size", "4", r"engine\.block_size must be int, got '4'"),
        ("engine.block_size", 0, r"engine\.block_size must be at least 1"),
        ("engine.policy", "lifo", r"engine\.policy must be one of fcfs, priority; got 'lifo'"),
        ("engine.watermark", 2, r"engine\.watermark must be between 0 and 1"),
        ("engine.enable_prefix_caching", "yes", r"engine\.enable_prefix_caching must be bool"),
        ("engine.max_num_batched_tokens", 3, r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(16\)"),
        (
            "engine.long_prefill_token_threshold",
            99,
            r"long_prefill_token_threshold \(99\) must be at most max_model_len",
        ),
        ("engine", [], r"engine must be an object"),
        ("tokens.mode", "random", r"tokens\.mode must be one of per_request, content"),
        ("tokens.vocab", 0, r"tokens\.vocab must be at least 1"),
        ("tokens.sed", 0, r"tokens\.sed is unknown; did you mean 'seed'"),
        ("requests", {}, r"requests must be a list"),
        ("requests", KeyError, r"requests must be a list, got None"),
        ("requests.0", 7, r"requests\[0\] must be an object, got 7"),
        ("requests.0.id", KeyError, r"requests\[0\]\.id is missing"),
        ("requests.0.id", 3, r"requests\[0\]\.id must be str"),
        ("requests.0.arrival_step", -1, r"requests\[0\]\.arrival_step must be at least 0"),
        ("requests.0.max_tokens", 0, r"requests\[0\]\.max_tokens must be at least 1"),
        ("requests.0.max_tokens", None, r"requests\[0\]\.max_tokens must be int"),
        ("requests.0.prompt", [], r"requests\[0\]\.prompt is empty"),
        ("requests.0.prompt", "text", r"requests\[0\]\.prompt must be list"),
        ("requests.0.prompt", [{"seed": 1}], r"requests\[0\]\.prompt must hold token ids or segments"),
        ("requests.0.prompt", [1, None], r"requests\[0\]\.prompt must hold token ids or segments"),
        ("requests.0.stop_token_ids", ["a"], r"requests\[0\]\.stop_token_ids must be a list of token ids"),
        ("requests.0.abort", 3, r"requests\[0\]\.abort is unknown; did you mean 'abort_step'"),
        ("record_free_queue", 1, r"record_free_queue must be bool"),
        ("extra", 1, r"extra is unknown"),
    ],
)
def test_mistakes_in_a_workload_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        list(replay(parse(changed(path, value))))


def test_names_must_differ() -> None:
    data = copy.deepcopy(BASE)
    data["requests"] *= 2
    with pytest.raises(ValueError, match=r"requests\[1\]\.id: 'a' is used twice"):
        parse(data)


def test_chunked_prefill_off_needs_a_budget_for_the_longest_prompt() -> None:
    data = changed("engine.enable_chunked_prefill", False)
    data["engine"]["max_num_batched_tokens"] = 20
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(20\) must be at least max_model_len \(28\)"):
        make_scheduler(parse(data))


def test_the_free_queue_can_be_left_out() -> None:
    lines = list(replay(parse(changed("record_free_queue", False))))
    assert all("free_queue" not in line for line in lines) and "ref_cnt" in lines[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.workload.json"
    file.write_text(json.dumps(BASE))
    assert main(["replay", str(file)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["scheduled"] == {"a": 5} and lines[-1]["requests"]["a"]["output"] == [
        next(iter(line["sampled"].values())) for line in lines if line.get("sampled")
    ]
    assert main(["replay", str(file), "--summary", "--check", "--kv-manager", "plain"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == {"FINISHED_LENGTH_CAPPED": 1}
    for text, message in [
        ("{", "is not JSON"),
        ("[]", "a workload must be a JSON object, got list"),
        (json.dumps(changed("engine.groups", ["mamba"])), "engine.groups must be ['full']"),
    ]:
        file.write_text(text)
        assert main(["replay", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("pagedvllm replay: error:") and message in captured.err and not captured.out
    assert main(["replay", str(tmp_path / "none.json")]) == 2
