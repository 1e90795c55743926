"""Text to token ids and back: a thin wrapper of transformers' tokenizer that also knows each token's bytes.

A token stands for bytes, not for characters: "😀" may be three tokens, none of which is text by itself. Two kinds of
vocabulary write bytes down, and the supported models use no other: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), where
each byte has a printable stand-in, and sentencepiece BPE with byte fallback (Llama 2), where a rare byte is `<0xE4>`.

vLLM: tokenizers/ (get_tokenizer), renderers/hf.py (chat templates).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pagedvllm.hub import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "▁"  # sentencepiece's stand-in for a space


class Tokenizer:
    """The tokenizer of a model directory.

    vocab_size: token ids the model takes, 0 <= id < vocab_size (config.json's, which may count padding rows).
    eos_token_ids: the ids that end a generation: generation_config.json's, then config.json's.
    special_ids: control tokens (`<|im_end|>`), which decoding leaves out by default.
    strips_first_space: the vocabulary writes a word with its space, and decoding drops a text's first one.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ModelError: no tokenizer there, or one of another kind than the two above."""
        from transformers import (
            AutoTokenizer,  # takes seconds: not before a tokenizer is needed
        )

        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"tokenizer: no such directory: {self.path}")
        try:
            self._hf: Any = AutoTokenizer.from_pretrained(
                str(self.path), local_files_only=True
            )
        except Exception as error:  # whatever a broken file makes the library raise
            raise ModelError(
                f"tokenizer: {self.path} holds none that can be loaded ({error})"
            ) from error
        self._kind, self.strips_first_space = _kind(self._hf, self.path)
        self.special_ids = frozenset(
            i for i, token in self._hf.added_tokens_decoder.items() if token.special
        )
        config, generation = (
            _read(self.path / "config.json"),
            _read(self.path / "generation_config.json"),
        )
        self.vocab_size = int(config.get("vocab_size") or len(self._hf))
        self.eos_token_ids = _eos(generation) + tuple(
            i for i in _eos(config) if i not in _eos(generation)
        )
        if not self.eos_token_ids and self._hf.eos_token_id is not None:
            self.eos_token_ids = (int(self._hf.eos_token_id),)
        self._num_ids = max(self.vocab_size, len(self._hf))
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; `add_special_tokens` adds what the model wants at the start (Llama's BOS; nothing here)."""
        if not isinstance(text, str):
            raise TypeError(f"text must be str, got {type(text).__name__}")
        check_characters("text", text)
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, U+FFFD where their bytes are not UTF-8. For a stream, see detokenizer.py."""
        self.check_ids(token_ids)
        text = self._hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token by itself, for display: its text, with `\\xf0` for a byte that is only part of a character."""
        self.check_ids(token_ids)
        return [
            self.token_bytes(i).decode("utf-8", errors="backslashreplace")
            for i in token_ids
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; none for a padding row of the model's vocabulary."""
        if token_id not in self._bytes:
            token = (
                self._hf.convert_ids_to_tokens(token_id)
                if token_id < len(self._hf)
                else None
            )
            self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return self._bytes[token_id]

    def _to_bytes(self, token: str) -> bytes:
        if self._kind == "byte_fallback":
            byte = _BYTE_TOKEN.fullmatch(token)
            return (
                bytes([int(byte[1], 16)])
                if byte
                else token.replace(_WORD_START, " ").encode()
            )
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()  # an added token, written as it is

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation [{"role": ..., "content": ...}, ...] in the form the model was trained on.

        add_generation_prompt: end with the words that open the assistant's answer.
        variables: further names for the template, such as Qwen3's `enable_thinking`.

        Raises:
            ModelError: the model has no chat template.
            ValueError: the template refuses the conversation (say, two user messages in a row).
        """
        from jinja2 import TemplateError

        _check_messages(messages)
        if self._hf.chat_template is None:
            raise ModelError(
                f"the model in {self.path} has no chat template: give it a text prompt instead of messages"
            )
        try:
            ids = self._hf.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
                **variables,
            )
        except TemplateError as error:
            raise ValueError(
                f"messages: the model's chat template refuses them ({error})"
            ) from error
        return list(ids)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises TypeError or ValueError, naming the first id that cannot be one."""
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise TypeError(
                f"token_ids must be a list of int, got {type(token_ids).__name__}"
            )
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(
                    f"token_ids[{index}] must be int, got {type(token_id).__name__}"
                )
            if not 0 <= token_id < self._num_ids:
                raise ValueError(
                    f"token_ids[{index}] = {token_id} is out of the vocabulary (0 to {self._num_ids - 1})"
                )


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on.

    Source: GPT-2's encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _kind(hf: Any, path: Path) -> tuple[Literal["byte_level", "byte_fallback"], bool]:
    """How the vocabulary writes bytes, and whether decoding strips the first space: read from the decoder's parts."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        raise ModelError(f"tokenizer: {path} needs a tokenizer.json with a decoder")
    decoder = json.loads(backend.decoder.__getstate__())
    parts = {part["type"]: part for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in parts:
        return "byte_level", False
    if "ByteFallback" in parts or "Metaspace" in parts:
        metaspace = parts.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        return "byte_fallback", metaspace or parts.get("Strip", {}).get("start", 0) > 0
    raise ModelError(
        f"tokenizer: {path} is neither byte-level nor byte-fallback BPE (its decoder: {', '.join(parts)})"
    )


def check_characters(name: str, text: str) -> None:
    """Raise ValueError for half of a surrogate pair: what bytes that are not UTF-8 become."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds a lone surrogate at character {error.start}, which is no character"
        ) from None


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise TypeError(
            'messages must be a list, not empty, of {"role": ..., "content": ...}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TypeError(
                f"messages[{index}] must be a dict, got {type(message).__name__}"
            )
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"messages[{index}] has no {key!r}")
            if not isinstance(message[key], str):
                raise TypeError(
                    f"messages[{index}][{key!r}] must be str, got {type(message[key]).__name__}"
                )
            check_characters(f"messages[{index}][{key!r}]", message[key])


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


def _eos(config: dict[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
