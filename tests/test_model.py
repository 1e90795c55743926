"""Logits equal transformers', for every family, whole, chunked and one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedvllm.config import ModelConfig
from pagedvllm.model.config import DecoderConfig
from pagedvllm.model.decoder import DecoderForCausalLM
from pagedvllm.model.loader import load_model
from pagedvllm.reference import CachedSequence
from tests.conftest import VARIANTS, save_checkpoint

CPU = torch.device("cpu")
IDS = [7, 3, 99, 15, 4, 4, 62, 1, 88, 30, 41, 12, 9, 77, 5, 50, 23, 6, 71, 18, 33, 2, 90, 45, 11, 8, 64, 27, 19, 100]


def every_row(model: DecoderForCausalLM, ids: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits after each piece of the sequence."""
    sequence, rows, start = CachedSequence(model, len(ids)), [], 0
    for size in pieces:
        rows.append(sequence.forward(ids[start : start + size]))
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    oracle = save_checkpoint(tmp_path, variant)
    with torch.inference_mode():
        want = oracle(torch.tensor([IDS])).logits[0]
    model = load_model(tmp_path, ModelConfig(), CPU)
    assert model.lm_head is None or "tied" not in variant
    torch.testing.assert_close(every_row(model, IDS, [len(IDS)])[0], want[-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(every_row(model, IDS, [1] * len(IDS)), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(every_row(model, IDS, [11, 1, 18]), want[[10, 11, 29]], rtol=0, atol=1e-4)


def test_logits_of_the_embedded_model(embedded: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    oracle = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = oracle(torch.tensor([ids])).logits[0]
    model = load_model(embedded, ModelConfig(dtype="float32"), CPU)
    torch.testing.assert_close(every_row(model, ids, [1] * len(ids)), want, rtol=0, atol=1e-4)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    oracle = save_checkpoint(tmp_path, "qwen3", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.inference_mode():
        want = oracle(torch.tensor([IDS])).logits[0, -1:]
    model = load_model(tmp_path, ModelConfig(), CPU)
    torch.testing.assert_close(every_row(model, IDS, [len(IDS)]), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("old", [{"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}])
def test_old_rope_settings_mean_the_same(old: dict, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-linear-rope")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in raw
    new = DecoderConfig.from_dict(raw)
    del raw["rope_parameters"]
    assert DecoderConfig.from_dict(raw | old) == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel is not supported; supported: Llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type: 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' needs the setting factor"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) does not divide by num_key_value_heads \(3\)"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor: 0.5"),
    ],
)
def test_unsupported_configs_are_named(change: dict, message: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, ModelConfig(), CPU)


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in good.items() if k != name}, file)
    with pytest.raises(ValueError, match=rf"tensor {name} is missing \(1 in all\)"):
        load_model(tmp_path, ModelConfig(), CPU)
    save_file(good | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file)
    with pytest.raises(ValueError, match=r"q_proj.bias is not part of LlamaForCausalLM"):
        load_model(tmp_path, ModelConfig(), CPU)
    save_file(good | {name: torch.zeros(16, 31)}, file)
    with pytest.raises(ValueError, match=r"k_proj.weight has shape \[16, 31\], expected \[16, 32\]"):
        load_model(tmp_path, ModelConfig(), CPU)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    one, same, other = (load_model(tmp_path, ModelConfig(load_format="dummy", seed=s), CPU) for s in (1, 1, 2))
    states = [torch.cat([p.flatten() for p in m.parameters()]) for m in (one, same, other)]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])
    assert every_row(one, IDS, [len(IDS)]).isfinite().all()


def test_max_model_len_has_a_limit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="max_model_len must be at most 128"):
        load_model(tmp_path, ModelConfig(max_model_len=129), CPU)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    oracle = save_checkpoint(tmp_path, "qwen3")
    with torch.inference_mode():
        want = oracle(torch.tensor([IDS])).logits[0, -1:]
    model = load_model(tmp_path, ModelConfig(dtype=dtype), CPU)
    got = every_row(model, IDS, [len(IDS)])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)
