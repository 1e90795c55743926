"""What is said where a kernel cannot run: no Triton, no interpreter, no bf16."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from pagedvllm.attention.triton_paged import TritonPagedAttention
from pagedvllm.kernels.launch import check_device
from tests.kernels.support import CPU


def python(code: str) -> str:
    """What a fresh Python without TRITON_INTERPRET prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_the_package_works_and_the_kernels_name_what_is_missing() -> None:
    out = python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from pagedvllm.config import EngineConfig, ATTENTION_BACKENDS, OPS\n"
        "from pagedvllm.plugins import resolve_from\n"
        "import pagedvllm.llm, pagedvllm.engine.llm_engine, pagedvllm.worker.model_runner\n"
        "EngineConfig.create(attention_backend='triton', ops='triton')\n"
        "for table in (ATTENTION_BACKENDS, OPS):\n"
        "    try:\n"
        "        resolve_from(table, 'triton', object)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error.name, '|', error)\n"
    )
    lines = out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("triton | attention_backend 'triton' and ops 'triton' need the package triton")
        assert "macOS" in line and "'torch' runs everywhere" in line


def test_on_a_cpu_without_the_interpreter() -> None:
    out = python(
        "import torch\n"
        "from pagedvllm.attention.triton_paged import TritonPagedAttention\n"
        "from pagedvllm.kernels.ops import TritonOps\n"
        "cpu, x = torch.device('cpu'), torch.zeros(2, 4)\n"
        "backend = lambda: TritonPagedAttention([], 2, 4, torch.float32, cpu)\n"
        "for call in (backend, lambda: TritonOps().silu_and_mul(x)):\n"
        "    try:\n"
        "        call()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    lines = out.splitlines()
    assert len(lines) == 2
    assert all("device 'cpu'" in line and "set TRITON_INTERPRET=1 before Python starts" in line for line in lines)


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check_device.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5 if device.index == 0 else 9))
    yield
    check_device.cache_clear()


def test_dtypes(turing: None) -> None:
    with pytest.raises(ValueError, match=r"bfloat16 needs compute capability 8\.0, cuda:0 has 7\.5: .*dtype='float16'"):
        check_device(torch.device("cuda:0"), torch.bfloat16)
    check_device(torch.device("cuda:0"), torch.float16)
    with pytest.raises(ValueError, match=r"dtype must be float32, float16 or bfloat16, got torch\.float64"):
        check_device(CPU, torch.float64)
    with pytest.raises(ValueError, match="dtype bfloat16: the matrix product of Triton's interpreter"):
        TritonPagedAttention([], 2, 4, torch.bfloat16, CPU)
