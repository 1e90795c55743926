"""Ahead of time, without a GPU: one form of each kernel for each target. All of them: `pagedvllm check --kernels`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedvllm.commands.check_kernels import table
from pagedvllm.kernels.catalogue import forms
from pagedvllm.kernels.compile import SHARED_KIB, Compiled, compile_launch

KERNELS = {
    "cache_write_kernel",
    "merge_splits_kernel",
    "paged_attention_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "silu_and_mul_kernel",
}
COMPILE = """
import json
from dataclasses import asdict
from pagedvllm.kernels.catalogue import forms
from pagedvllm.kernels.compile import SHARED_KIB, compile_launch
found = []
for target in SHARED_KIB:
    chosen = {form.call.kernel.fn.__name__: form for form in reversed(list(forms(target)))}  # the first of each
    found += [compile_launch(form.call, target) for form in chosen.values()]
print(json.dumps([asdict(c) | {"faults": c.faults()} for c in found]))
"""
STEPS = """
import json
import torch
from collections import Counter
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature
from pagedvllm.attention.base import AttentionSpec
from pagedvllm.kernels.attention_plan import Card, plan_attention
from pagedvllm.kernels.launch import recorded
from pagedvllm.kernels.ops import TritonOps
from pagedvllm.kernels.paged_attention import paged_attention
ops, spec, cpu = TritonOps(), AttentionSpec(0, 4, 2, 64, torch.empty(0)), torch.device("cpu")
x, ids = torch.zeros(99, 4, 64, dtype=torch.float16), torch.zeros(99, dtype=torch.int64)
tables, kv, angles = torch.zeros(99, 99, dtype=torch.int64), x[:, :2].contiguous(), torch.zeros(99, 64)
cache = kv.view(-1, 11, 2, 64)
with recorded() as calls:
    for n in [*range(1, 18), 32, 33]:  # requests, all of them decoding
        plan = plan_attention(list(range(n + 1)), [33] * n, spec, x.dtype, cpu, Card(90, 132))
        paged_attention(x[:n], cache, cache, tables[:n, :n], plan, 0.1)
        ops.rms_norm(x[:n, 0].contiguous(), x[0, 0], 1e-6)
        ops.silu_and_mul(x[:n].flatten(1))
        ops.rotary(x[:n], kv[:n], ids[:n], angles)
        ops.write_cache(kv[:n], kv[:n], kv, kv, ids[:n])
backend, variants = CUDABackend(GPUTarget("cuda", 90, 32)), set()
for call in calls:
    bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
    variants.add((call.kernel.fn.__name__, str(bind(*call.arguments, **call.constants)[1])))
print(json.dumps(Counter(name for name, _ in variants)))
"""


def run(script: str, cache: Path) -> Any:
    """In a process of its own: here kernels are decorated for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(COMPILE, tmp_path_factory.mktemp("triton"))
    return found


@pytest.mark.parametrize("target", SHARED_KIB)
def test_every_kernel_compiles_for_every_target(compiled: list[dict[str, Any]], target: int) -> None:
    found = {c["kernel"]: c for c in compiled if c["target"] == target}
    assert set(found) == KERNELS
    for c in found.values():
        assert 0 < c["registers"] <= 255 and c["faults"] == []
    attention = found["paged_attention_kernel"]
    assert attention["shared"] > 4096 and attention["spills"] == 0


def test_no_step_of_another_size_makes_triton_compile_anew(tmp_path: Path) -> None:
    """Triton compiles a kernel for each alignment of a pointer and for numbers that are 1 or divisible by 16."""
    variants = run(STEPS, tmp_path)
    assert variants == dict.fromkeys(KERNELS - {"merge_splits_kernel"}, 1)


def test_the_catalogue_holds_every_kernel_head_size_and_dtype() -> None:
    for target in SHARED_KIB:
        all_forms = list(forms(target))
        assert {form.call.kernel.fn.__name__ for form in all_forms} == KERNELS
        labels = " ".join(form.label for form in all_forms)
        assert all(f"D={dim}" in labels for dim in (64, 80, 96, 128, 256))
        assert [t for t in ("float16 ", "bfloat16 ", "float32 ") if t not in labels] == ["bfloat16 "] * (target < 80)
        names = [(form.call.kernel.fn.__name__, form.label) for form in all_forms]
        assert len(set(names)) == len(names)  # a row of the table each


def test_faults() -> None:
    assert Compiled("k", 90, 227 * 1024, 255, 0).faults() == []
    assert Compiled("k", 75, 1024, 255, 8).faults() == []  # slow, not wrong
    assert Compiled("k", 86, 102_000, 255, 8).faults() == [
        "102000 bytes of shared memory, sm_86 has 101376",
        "8 bytes of registers spilled on sm_86",
    ]


def test_what_cannot_be_compiled() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_launch(next(forms(90)).call, 90)
    with pytest.raises(ValueError, match="--kernels must be some of 75, 80, 86, 89, 90, 100, 120; got 91"):
        table([90, 91])


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two made-up kernels: a row each, and what is wrong makes the command fail."""
    from pagedvllm.cli import main
    from pagedvllm.commands import check_kernels

    made = [("float16 D=64", Compiled("good", 90, 1024, 32, 0)), ("float16 D=128", Compiled("bad", 80, 0, 255, 16))]
    asked: list[Any] = []
    monkeypatch.setattr(check_kernels, "compile_all", lambda targets: asked.append(targets) or made)
    assert main(["check", "--no-model", "--kernels", "80", "90"]) == 1
    out = capsys.readouterr().out
    assert asked == [(80, 90)]
    assert re.search(r"^  sm_90 good float16 D=64 +1024 B shared, 32 registers, 0 B spilled$", out, re.MULTILINE)
    assert "problem: kernels: sm_80 bad float16 D=128: 16 bytes of registers spilled on sm_80" in out
    assert main(["check", "--no-model", "--kernels", "--json"]) == 1
    assert asked[1] == tuple(SHARED_KIB) and len(json.loads(capsys.readouterr().out)["kernels"]) == 2
