"""Ids to text while they come: a character is given out once, when all of its bytes are there.

Decoding each token alone breaks characters; decoding everything after each token costs quadratic time. Here each
token's bytes go through an incremental UTF-8 decoder, which keeps at most three bytes back: constant work for a token.

vLLM: v1/engine/detokenizer.py, IncrementalDetokenizer: a windowed decode, for any tokenizer; bytes are exact.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pagedvllm.outputs import FinishReason
from pagedvllm.sampling_params import SamplingParams
from pagedvllm.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no character
_LONGEST_TAIL = (
    3  # bytes: the longest beginning of a UTF-8 character that is not the whole of it
)


class IncrementalDetokenizer:
    """The text of one request's output, delta by delta.

    The rule: all deltas together are what decode(prompt + output) adds to decode(prompt), that is, what follows their
    longest common beginning. So nothing of the prompt comes out, and a character that the prompt began and the output
    completes comes out whole. With no prompt, or one that ends between characters, that is decode(output).

    Bytes that can never become a character come out as U+FFFD at once, and a character that is still not whole at the
    end does so in finish(). (With byte-fallback vocabularies transformers spoils a whole run of byte tokens for one bad
    byte in it; here, as with byte-level ones, only the bad byte is replaced.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        tokenizer.check_ids(prompt_token_ids)
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pieces: list[str] = []
        self._finished = False
        tail = self._prompt_tail(prompt_token_ids)
        self._decoder.decode(tail)  # the text is the prompt's: dropped
        self._prompt_owes_char = bool(self._decoder.getstate()[0])
        self._strip_space = tokenizer.strips_first_space and not tail

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> IncrementalDetokenizer:
        """As a request's parameters ask for it."""
        return cls(tokenizer, prompt_token_ids, params.skip_special_tokens)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, as many as a broken character can have: the rest cannot matter."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _LONGEST_TAIL:
                break
            tail = self._bytes([token_id]) + tail
        return tail

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(
            self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped
        )

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; the text that they complete ("" while a character lacks bytes)."""
        if self._finished:
            raise ValueError("token_ids came after finish()")
        self._tokenizer.check_ids(token_ids)
        return self._emit(self._decoder.decode(self._bytes(token_ids)))

    def finish(self) -> str:
        """No more tokens: what is left, U+FFFD for a character that stays incomplete."""
        if self._finished:
            return ""
        self._finished = True
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, delta: str) -> str:
        if delta and self._prompt_owes_char:
            self._prompt_owes_char = False
            delta = delta.removeprefix(
                REPLACEMENT
            )  # the output did not complete it: it is the prompt's
        if delta and self._strip_space:
            self._strip_space = False
            delta = delta.removeprefix(" ")
        if delta:
            self._pieces.append(delta)
        return delta


def text_tokens(
    token_ids: list[int], finish_reason: FinishReason | None, params: SamplingParams
) -> list[int]:
    """Those of a step's tokens that are text: the one that stops a request is not."""
    if not params.detokenize:
        return []
    stops = finish_reason == "stop" and not params.include_stop_str_in_output
    return token_ids[:-1] if stops else token_ids
