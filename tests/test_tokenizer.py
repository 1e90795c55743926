"""Text to ids and back; the incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedvllm.detokenizer import REPLACEMENT, IncrementalDetokenizer
from pagedvllm.hub import EMBEDDED_MODEL, ModelError, resolve_model
from pagedvllm.tokenizer import Tokenizer

# Several bytes a character, several characters a sign, and what is rare in the vocabulary.
HARD_TEXT = "a é ß 你好，世界 👩🏽‍🚀🇨🇳 é ひらがな नमस्ते \t\n  1  22 \ufffd ﷽ Z̤͔a̷l̴g̵o̸ <|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """byte -> the token that is that byte alone (this vocabulary leaves out 21 bytes)."""
    pairs = ((tokenizer.token_bytes(i), i) for i in range(tokenizer.vocab_size))
    return {piece[0]: i for piece, i in pairs if len(piece) == 1 and i not in tokenizer.special_ids}


def stream(detokenizer: IncrementalDetokenizer, ids: Sequence[int], size: int = 1) -> list[str]:
    deltas = [detokenizer.add(list(ids[i : i + size])) for i in range(0, len(ids), size)]
    return [*deltas, detokenizer.finish()]


def common_length(first: str, second: str) -> int:
    """Characters of the longest beginning that both texts have."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


# Tokenizer


def test_the_embedded_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))
    ids = tokenizer.encode("The capital of France is Paris.")
    assert tokenizer.tokens(ids) == ["The", " capital", " of", " France", " is", " Paris", "."]
    assert tokenizer.decode(ids) == "The capital of France is Paris."


def test_ids_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer.path)
    for text in (HARD_TEXT, "", " ", "def f(x):\n    return x  # 2024"):
        assert tokenizer.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    for generation in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=generation) == expected


def test_every_token_s_bytes_are_what_decoding_gives(tokenizer: Tokenizer) -> None:
    every = range(tokenizer.vocab_size)
    pieces = [tokenizer.token_bytes(i) for i in every]
    whole = [i for i in every if b"\xff" not in pieces[i]]
    assert b"".join(pieces[i] for i in whole).decode(errors="replace") == tokenizer.decode(
        whole, skip_special_tokens=False
    )
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in every[::50]] == [
        piece.decode(errors="replace") for piece in pieces[::50]
    ]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes<|im_end|>")
    assert tokenizer.decode(ids) == "yes"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "yes<|im_end|>"
    assert tokenizer.tokens(ids) == ["yes", "<|im_end|>"]


def test_tokens_shows_the_bytes_of_a_split_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    assert "".join(tokenizer.tokens(ids)) == r"\xf0\x9f\x98\x80"


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 49152], ValueError, r"token_ids\[1\] = 49152 is out of the vocabulary \(0 to 49151\)"),
        ([-1], ValueError, r"token_ids\[0\] = -1"),
        (["a"], TypeError, r"token_ids\[0\] must be int, got str"),
        ([True], TypeError, "must be int, got bool"),
        ("12", TypeError, "must be a list of int, got str"),
        (7, TypeError, "must be a list of int, got int"),
    ],
)
def test_ids_that_cannot_be(tokenizer: Tokenizer, ids: list[int], error: type[Exception], message: str) -> None:
    for use in (
        tokenizer.decode,
        tokenizer.tokens,
        IncrementalDetokenizer(tokenizer).add,
        lambda ids: IncrementalDetokenizer(tokenizer, ids),
    ):
        with pytest.raises(error, match=message):
            use(ids)


def test_text_that_cannot_be(tokenizer: Tokenizer) -> None:
    with pytest.raises(TypeError, match="text must be str, got bytes"):
        tokenizer.encode(b"x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], TypeError, "not empty"),
        ("hello", TypeError, "messages must be a list"),
        (["hello"], TypeError, r"messages\[0\] must be a dict, got str"),
        ([{"role": "user"}], ValueError, r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": None}], TypeError, r"messages\[0\]\['content'\] must be str, got NoneType"),
    ],
)
def test_messages_that_cannot_be(
    tokenizer: Tokenizer, messages: list[dict[str, str]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer.apply_chat_template(messages)


def test_a_chat_template_that_is_missing_or_refuses(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer.path / name).read_bytes())
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(messages)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"refuses them .*roles must alternate"):
        Tokenizer(tmp_path).apply_chat_template(messages)


def test_eos_and_size_come_from_the_model_s_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer.path / name).read_bytes())
    assert Tokenizer(tmp_path).eos_token_ids == (2,)  # the tokenizer's own
    assert Tokenizer(tmp_path).vocab_size == 49152
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "vocab_size": 49280, "model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    padded = Tokenizer(tmp_path)
    assert padded.eos_token_ids == (0, 5)
    assert padded.vocab_size == 49280
    # A row that only pads the embedding may be sampled by a model with random weights: it is no text, and no error.
    assert padded.decode([49279]) == padded.tokens([49279])[0] == IncrementalDetokenizer(padded).add([49279]) == ""


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds none that can be loaded"):
        Tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such directory"):
        Tokenizer(tmp_path / "nowhere")


# Incremental detokenizer


def test_a_character_comes_out_with_its_last_byte(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = [byte_ids[b] for b in "a😀b".encode()]
    assert stream(IncrementalDetokenizer(tokenizer), ids) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("skip", [True, False])
def test_hard_text_never_breaks(tokenizer: Tokenizer, size: int, skip: bool) -> None:
    ids = tokenizer.encode(HARD_TEXT.replace(REPLACEMENT, ""))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas = stream(detokenizer, ids, size)
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_invalid_bytes_do_not_stall_the_stream(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add([byte_ids[0x80]]) for _ in range(4)] == [REPLACEMENT] * 4
    assert detokenizer.add([byte_ids[0xE4]]) == ""  # may still become a character
    assert detokenizer.add([byte_ids[ord("x")]]) == f"{REPLACEMENT}x"
    real = [byte_ids[b] for b in REPLACEMENT.encode()]
    assert [detokenizer.add([i]) for i in real] == ["", "", REPLACEMENT]  # the character U+FFFD itself: at once


def test_what_is_left_comes_out_at_the_end(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add([byte_ids[0xE4], byte_ids[0xBD]]) == ""
    assert [detokenizer.finish(), detokenizer.finish()] == [REPLACEMENT, ""]
    assert detokenizer.text == REPLACEMENT
    with pytest.raises(ValueError, match=r"after finish\(\)"):
        detokenizer.add([0])


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"secret \xf0\x9f", b"\x98\x80 yes", "😀 yes"),  # completed: whole, and nothing before it
        (b"secret \xf0\x9f", b"yes", "yes"),  # not completed: the broken character is the prompt's
        (b"secret \xf0\x9f", b"\x98yes", "yes"),
        (b"secret \xf0\x9f", b"", ""),
        (b"secret \xf0\x9f", b"\xef\xbf\xbd!", "\ufffd!"),  # a U+FFFD of the output's own is kept
        (b"\xe4\xbd", b"\xa0", "你"),
        (b"secret", b" yes", " yes"),
        (b"", b" yes", " yes"),
    ],
)
def test_a_prompt_that_ends_within_a_character(
    tokenizer: Tokenizer, byte_ids: dict[int, int], prompt: bytes, output: bytes, text: str
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, [byte_ids[b] for b in prompt])
    assert "".join(stream(detokenizer, [byte_ids[b] for b in output])) == detokenizer.text == text


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_are_what_the_output_adds_to_the_prompt(
    tokenizer: Tokenizer, byte_ids: dict[int, int], data: st.DataObject
) -> None:
    text = st.text(
        alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("😀👩🏽‍🚀你好é\u0301\ufffd \n"), max_size=12
    )
    raw = st.lists(st.sampled_from(sorted(byte_ids.values())) | st.integers(0, 49151), max_size=12)
    hard = st.sampled_from([byte_ids[b] for b in b"\x80\x9f\xbd\xc3\xe0\xe4\xed\xef\xf0\xf3\xf4" if b in byte_ids])
    ids = data.draw(st.one_of(text.map(tokenizer.encode), raw, st.lists(hard, max_size=12)))
    cut, size, skip = data.draw(st.tuples(st.integers(0, len(ids)), st.integers(1, 4), st.booleans()))

    detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut], skip_special_tokens=skip)
    streamed = "".join(stream(detokenizer, ids[cut:], size))
    prompt, everything = (tokenizer.decode(part, skip_special_tokens=skip) for part in (ids[:cut], ids))
    assert streamed == detokenizer.text == everything[common_length(prompt, everything) :]


def test_work_for_a_token_does_not_grow(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = tokenizer.encode("你好 hello 😀 ")

    def seconds(count: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer)
        start = time.perf_counter()
        for i in range(count):
            detokenizer.add([ids[i % len(ids)]])
        return time.perf_counter() - start

    seconds(2000)
    assert min(seconds(32_000) for _ in range(3)) < 64 * min(seconds(2000) for _ in range(3))  # quadratic: 256 times


# A vocabulary of the other kind


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A sentencepiece-like vocabulary as Llama 2's: BOS, 256 byte tokens, a few pieces."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi", "好"]
    merges = [("▁", "h"), ("▁h", "i")]
    ids = {token: i for i, token in enumerate(vocab)}
    backend = Backend(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("byte_fallback")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(path)
    return Tokenizer(path)


@pytest.mark.parametrize("text", ["hi hi", "hi 你好 😀 hi", "", " hi", "😀"])
def test_byte_fallback_vocabulary(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text)
    assert byte_fallback.decode(ids) == text
    for cut in range(len(ids) + 1):
        detokenizer = IncrementalDetokenizer(byte_fallback, ids[:cut])
        deltas = stream(detokenizer, ids[cut:])
        assert not any(REPLACEMENT in delta for delta in deltas)
        assert text.endswith("".join(deltas))
        if REPLACEMENT not in (prompt := byte_fallback.decode(ids[:cut])):
            assert prompt + "".join(deltas) == text or not ids[:cut]


def test_byte_fallback_details(byte_fallback: Tokenizer) -> None:
    assert byte_fallback.strips_first_space
    bos, hi = 1, byte_fallback.encode("hi")
    assert "".join(stream(IncrementalDetokenizer(byte_fallback, [bos]), hi)) == "hi"
    assert "".join(stream(IncrementalDetokenizer(byte_fallback, [bos, *hi]), hi)) == " hi"
    assert byte_fallback.tokens(byte_fallback.encode("hi你")) == [" hi", r"\xe4", r"\xbd", r"\xa0"]


def test_another_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"neither byte-level nor byte-fallback BPE .*WordPiece"):
        Tokenizer(tmp_path)
