"""Chapter 6's helpers: a card that is made up, a start that is watched, what is alive at the peak, the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedvllm.config import EngineConfig
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.layers import Build
from pagedvllm.teach import start, start_figures, style
from pagedvllm.worker import worker
from pagedvllm.worker.memory import HostMemory
from pagedvllm.worker.profile import count_activations

MIB = 2**20
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    (path / "tokenizer.json").write_text("{}")
    return path


def config(checkpoint: Path, **settings: Any) -> EngineConfig:
    base = {"model": str(checkpoint), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    base |= {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "runner_cls": "simple"}
    return EngineConfig.create(**base | settings)


# ---------------------------------------------------------------- a card that is made up


def test_a_pretended_card_counts_real_tensors_and_refuses_when_it_is_full() -> None:
    with start.pretend_gpu(MIB, others=MIB // 4) as card:
        kept = torch.zeros(MIB // 16)  # a quarter of a MiB
        gone = torch.zeros(MIB // 16)
        del gone
        seen = card.snapshot()
        assert (seen.total, seen.free) == (MIB, MIB // 2)
        assert (seen.torch_allocated, seen.torch_peak) == (MIB // 4, MIB // 2)
        card.reset_peak()
        assert card.snapshot().torch_peak == MIB // 4
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(MIB // 4)  # one MiB
        torch.empty(MIB, device="meta")  # shapes take no room
        assert card.snapshot().free == MIB // 2
    assert kept.nbytes == MIB // 4


def test_the_real_memory_is_back_afterwards() -> None:
    with pytest.raises(KeyError), start.pretend_gpu(MIB):
        raise KeyError
    assert isinstance(worker.device_memory(torch.device("cpu")), HostMemory)


def test_a_watched_start_fills_the_card_up_to_the_share(checkpoint: Path) -> None:
    with start.pretend_gpu(8 * MIB, others=MIB // 4) as card:
        watched = start.watch(config(checkpoint), card)
        assert tuple(watched.stages) == start.STAGES
        profile = watched.core.executor.worker.memory_profile  # type: ignore[attr-defined]
        pages = watched.core.scheduler.kv.num_blocks * watched.core.executor.page_bytes
        loaded, made = watched.stages["load_model"], watched.stages["initialize_cache"]
        assert loaded.after == loaded.peak == profile.weights
        assert watched.stages["profile_run"].peak == profile.weights + profile.activations
        assert made.after == profile.weights + pages <= profile.requested - profile.activations
        assert profile.kv - pages < watched.core.executor.page_bytes
    from pagedvllm.worker.worker import Worker

    assert "watched" not in Worker.profile_run.__qualname__


def test_what_is_read_before_it_is_copied_takes_no_room_on_the_card(checkpoint: Path) -> None:
    """Random weights of the largest tensor are in RAM twice while they are drawn; a card needs room for one."""
    with start.pretend_gpu(8 * MIB) as card:
        weights = start.watch(config(checkpoint), card).stages["load_model"].after
    with start.pretend_gpu(weights + 4096), pytest.raises(ValueError, match="largest step does not fit"):
        start.EngineCore(config(checkpoint, gpu_memory_utilization=1.0))


def test_the_cut_model_is_the_embedded_one_with_fewer_layers() -> None:
    import json

    raw = json.loads((Path(start.cut_model(3)) / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["hidden_size"], raw["vocab_size"]) == (3, 576, 49152)


# ---------------------------------------------------------------- what is alive at the peak


@pytest.mark.parametrize(("tokens", "rows", "operation"), [(256, 1, "mm"), (16, 16, "sort")])
def test_the_tensors_at_the_peak_are_the_peak(tokens: int, rows: int, operation: str) -> None:
    build = Build(torch.bfloat16, torch.device("meta"))
    model = DecoderForCausalLM(DecoderConfig.from_dict({**TINY, "vocab_size": 4096}), 256, build)
    alive = start.tensors_at_peak(model, tokens, rows)
    assert sum(made.num_bytes for made in alive) == count_activations(model, tokens, rows)
    assert operation in [made.operation for made in alive]


def test_a_tensor_in_words() -> None:
    made = start.Made("mm", (8192, 28672), "bfloat16", 448 * MIB)
    assert str(made) == "mm          [8192, 28672]   bfloat16    448.0 MiB"


# ---------------------------------------------------------------- figures


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, str]]]:
    figures: list[tuple[Any, str]] = []

    def keep(fig: Any, alt: str) -> None:
        style.svg(fig)  # no text under 8 points
        figures.append((fig, alt))

    monkeypatch.setattr(start_figures, "show", keep)
    yield figures


def test_memory_bars(shown: list[tuple[Any, str]]) -> None:
    gib = 2**30
    start_figures.memory_bars({"a card": {"weights": 2 * gib, "KV cache": 1 * gib, "not used": gib}})
    fig, alt = shown[0]
    assert alt == "Where a card's memory goes, in GiB. a card: weights 2, KV cache 1, not used 1."
    assert [text.get_text() for text in fig.axes[0].texts] == ["2", "1", "1"]
    assert [patch.get_width() for patch in fig.axes[0].patches] == [50, 25, 25]


def test_start(shown: list[tuple[Any, str]]) -> None:
    gib = 2**30
    stages = {"load_model": (gib, gib), "profile_run": (gib, 1.5 * gib)}
    start_figures.start(stages, requested=1.8 * gib, total=2 * gib)
    assert shown[0][1] == (
        "GiB of tensors over a start on a card of 2.00."
        " load_model: 1.00, at most 1.00; profile_run: 1.00, at most 1.50."
    )


def test_shares_panels_and_beside(shown: list[tuple[Any, str]]) -> None:
    start_figures.shares({"load_model": 3.0, "profile_run": 1.0})
    start_figures.panels({"share": ([0.8, 0.9], [10, 20]), "seats": ([16, 32], [20, 5])}, "tokens", logs=["seats"])
    start_figures.beside([0.8, 0.9], {"steps": [30, 10], "preemptions": [4, 0]}, "share")
    assert shown[0][1] == "Shares of the time of a start: load_model 75%, profile_run 25%."
    assert "share from 0.8 to 0.9: from 10 to 20; seats from 16 to 32: from 20 to 5." in shown[1][1]
    assert shown[2][1] == "As share rises from 0.8 to 0.9: steps from 30 to 10; preemptions from 4 to 0."
    assert len({axis.get_ylim()[1] for axis in shown[1][0].axes}) == 1  # one scale for all
