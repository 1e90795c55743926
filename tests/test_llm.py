"""`LLM` on the embedded model: what a reader types on the first page, and what they get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from pagedvllm import LLM, SamplingParams
from pagedvllm.cli import main

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "1, 2, 3,", "Once upon a time"]


@pytest.fixture(scope="module")
def llm(embedded: Path) -> LLM:
    return LLM(str(embedded), engine="reference")


@pytest.fixture(scope="module")
def oracle(embedded: Path) -> dict[str, list[int]]:
    """transformers' greedy tokens, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    model = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    out = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=2)
        out[prompt] = tokens[0, ids["input_ids"].shape[1] :].tolist()
    return out


def tokens(outputs: list) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_same_tokens_as_transformers(llm: LLM, oracle: dict[str, list[int]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == list(oracle.values())
    assert [o.prompt for o in outputs] == PROMPTS
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert all(o.outputs[0].text == llm.tokenizer.decode(o.outputs[0].token_ids) for o in outputs)


def test_recomputing_gives_the_same_tokens(embedded: Path, oracle: dict[str, list[int]]) -> None:
    slow = LLM(str(embedded), engine="recompute")
    assert tokens(slow.generate(PROMPTS, GREEDY)) == list(oracle.values())


def test_positions_are_contiguous(llm: LLM, oracle: dict[str, list[int]]) -> None:
    """nano-vllm issue 67: a decode position off by one changes tokens silently."""
    seen: list[int] = []
    model = llm.engine.model  # type: ignore[attr-defined]
    hook = model.register_forward_pre_hook(lambda module, args: seen.extend(args[1].positions.tolist()))
    got = llm.generate(PROMPTS[1], GREEDY)
    hook.remove()
    assert seen == list(range(len(got[0].prompt_token_ids) + 11))
    assert tokens(got) == [oracle[PROMPTS[1]]]


def test_calling_conventions(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    want = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    for prompt in (ids, [ids], [{"prompt": PROMPTS[0]}], {"prompt_token_ids": ids}, (PROMPTS[0],)):
        assert llm.generate(prompt, GREEDY)[0].outputs[0] == want
    assert llm.generate([]) == []
    assert len(llm.generate(PROMPTS[0])[0].outputs[0].token_ids) <= 16  # vLLM's default
    short, long = llm.generate(PROMPTS[:2], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (1, 3)


def test_chat(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None
    assert len(llm.chat([question, question], GREEDY)) == 2


def test_seeded_requests_repeat(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=8)
    first = llm.generate(PROMPTS[0], seeded)
    again = llm.generate([PROMPTS[1], PROMPTS[0]], [SamplingParams(max_tokens=3), seeded])[1:]
    other = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=8, max_tokens=8))
    assert tokens(first) == tokens(again) != tokens(other)


def test_stop_token(llm: LLM, oracle: dict[str, list[int]]) -> None:
    stop = oracle[PROMPTS[0]][2]
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == oracle[PROMPTS[0]][:3]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_streaming_grows_and_can_be_left(llm: LLM) -> None:
    texts = [o.outputs[0].text for o in llm.stream(PROMPTS[0], GREEDY)]
    assert texts[-1] == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    assert all(b.startswith(a) for a, b in pairwise(texts)) and len(texts) == 12
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate(PROMPTS[1], GREEDY)) == 1


def test_two_users_of_one_engine(llm: LLM, oracle: dict[str, list[int]]) -> None:
    """A stream goes on though somebody else's call steps the engine meanwhile; so do threads."""
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(first), next(second)
    assert tokens(llm.generate(PROMPTS[2], GREEDY)) == [oracle[PROMPTS[2]]]
    assert [tokens(list(s)[-1:]) for s in (first, second)] == [[oracle[p]] for p in PROMPTS[:2]]

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda p: llm.generate(p, GREEDY)[0].outputs[0].token_ids, PROMPTS))
    assert answers == [oracle[p] for p in PROMPTS]
    assert not llm.engine.has_unfinished_requests() and not llm._outputs and not llm._finished


def test_a_prompt_that_cannot_fit_is_refused_alone(embedded: Path) -> None:
    small = LLM(str(embedded), engine="reference", max_model_len=10)
    good, bad, last = small.generate([[1, 2, 3], list(range(10)), list(range(9))], GREEDY)
    assert len(good.outputs[0].token_ids) == 7 and good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error" and "max_model_len 10 at most 9" in bad.error
    assert len(last.outputs[0].token_ids) == 1
    assert [o.outputs[0].finish_reason for o in small.stream(list(range(10)))] == ["error"]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, r"prompts\[0\] is empty"),
        (["a", ""], ValueError, r"prompts\[1\] is empty"),
        ([[]], ValueError, r"prompts\[0\] is empty"),
        ([1, 49152], ValueError, r"prompts\[0\] holds token id 49152; the vocabulary has 49152"),
        ([1, -1], ValueError, "holds token id -1"),
        ([1, "a"], TypeError, "must hold token ids, got 'a'"),
        (7, TypeError, "prompts must be a prompt or a list of prompts, got int"),
        ([None], TypeError, r"prompts\[0\] must be text or a list of token ids, got NoneType"),
        ({"text": "a"}, ValueError, "must hold exactly one of"),
    ],
)
def test_bad_prompts_are_named_and_nothing_runs(llm: LLM, prompts: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished_requests()


def test_bad_parameters_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n is not supported by engine 'reference'"):
        llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(n=2)])
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(PROMPTS[:2], [GREEDY])
    with pytest.raises(TypeError, match="messages must be a list of messages, got dict"):
        llm.chat({"role": "user", "content": "a"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(PROMPTS[0], {"temperature": 0})  # type: ignore[arg-type]


def test_command(embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", "--model", str(embedded), "--prompt", "What is the capital of France?"]
    assert main(ask) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
    assert main([*ask, "--json", "--max-tokens", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["finish_reason"] == "length"
    for extra, message in [
        (["--top-p", "7"], "top_p must be above 0 and at most 1, got 7.0"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--prompt", ""], "--prompt is empty"),
        (["--max-model-len", "4"], "max_model_len 4"),
        (["--raw", "--system", "x"], "--system needs the chat template"),
        (["--device", "tpu9"], "device must be cpu, cuda or cuda:N, got 'tpu9'"),
    ]:
        assert main([*ask, *extra]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.startswith("pagedvllm generate: error:"), captured.err


def test_dummy_weights_need_no_weights_on_disk(tmp_path: Path, embedded: Path) -> None:
    for file in embedded.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="no weights"):
        LLM(str(tmp_path))
    dummy = LLM(str(tmp_path), load_format="dummy")
    assert len(dummy.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids) == 12


def test_importing_the_package_costs_nothing() -> None:
    code = "import sys, pagedvllm, pagedvllm.cli; print('torch' in sys.modules, pagedvllm.__version__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[0] == "False"
