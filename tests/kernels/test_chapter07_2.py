"""Chapter 7.2's helpers: where kernels run, cases that can fail, figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from pagedvllm.kernels.paged_attention import paged_attention
from pagedvllm.teach import kernel_cases, kernel_figures, style
from pagedvllm.teach.interpreter import NOT_RUN, without_triton

TABLES = [[6, 2], [3, 7], [5, 1, 8]]


def test_a_case_knows_right_from_wrong() -> None:
    case = kernel_cases.paged_case([(0, 5), (4, 3), (9, 1)], TABLES)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.tables, case.plan(), case.scale)
    assert case.error(out) < 1e-6 < 1e-2 < case.error(out.flip(0))
    used = sum(case.lengths)
    assert int((~case.k_cache[:, :, 0, 0].isnan()).sum()) == used  # all else is NaN
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.tables.flip(0), case.plan(), case.scale)
    assert case.error(out) != case.error(out)  # through wrong tables: NaN


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        ("# needs triton\nx = 1\n", False),
        ('@extends("pagedvllm.kernels.launch")\ndef launch(): ...\n', False),
        ('@extends("pagedvllm.attention.triton_paged:TritonPagedAttention")\ndef forward(): ...\n', False),
        ('@extends("pagedvllm.attention.paged")\ndef pad_tables(): ...\n', True),
        ("x = 1\n# needs triton\n", True),
    ],
)
def test_cells_without_triton(cell: str, runs: bool) -> None:
    lines = cell.splitlines(keepends=True)
    assert (without_triton(lines) == lines) is runs
    if not runs:
        assert without_triton(lines) == [f"print({NOT_RUN!r})\n"]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "kernels: in Triton's interpreter, on the CPU True"),
        ("sys.modules['triton'] = None; import importlib.util as u; u.find_spec = lambda n: None", "no triton"),
        ("import triton", "RuntimeError"),
        (
            "os.environ['PAGEDVLLM_DEVICE'] = 'cuda:0'; import torch; torch.cuda.get_device_name = str",
            "on the GPU False",
        ),
    ],
)
def test_prepare(before: str, said: str) -> None:
    code = f"import os, sys\nos.environ.pop('TRITON_INTERPRET', None)\n{before}\n" + (
        "from pagedvllm.teach import interpreter\ninterpreter.prepare()\n"
        "from pagedvllm.kernels.launch import INTERPRETED\nprint(INTERPRETED)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said in (done.stdout.replace("\n", " ") + done.stderr)


FIGURES: dict[str, tuple[Callable[[], None], str]] = {
    "path": (
        lambda: kernel_figures.program_path([5, 1, 8], 10, 4, 8, 8),
        "keys 0 to 3 in block 5; keys 4 to 7 in block 1; keys 8 to 9 in block 8; of each, only KV head 0",
    ),
    "touched": (
        lambda: kernel_figures.memory_touched({"a": [(4, 0), (4, 1)], "b": [(2, 0)]}, 6, 4),
        "a touches row 4, columns 0 to 1; b touches row 2, columns 0 to 0",
    ),
    "roofline": (lambda: kernel_figures.roofline({"x": 1.0, "y": 400.0}, 3e12, 9e14, "card"), "knee at 300"),
    "filled": (lambda: kernel_figures.filled({"1": (8, 256), "2": (640, 640)}, 528, "programs"), "programs"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(kernel_figures, "show", lambda fig, alt: said.append((style.svg(fig), alt)))
    draw, words = FIGURES[name]
    draw()
    assert said and words in said[0][1]


def test_attention64_is_causal_and_grouped() -> None:
    q, k = torch.zeros(2, 2, 4), torch.zeros(3, 1, 4)
    v = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1).expand(3, 1, 4)
    assert kernel_cases.attention64(q, k, v)[:, :, 0].tolist() == [[1.5, 1.5], [3.0, 3.0]]
