"""Where a notebook's Triton kernels run: on the GPU, in Triton's interpreter, or not at all."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any

from pagedvllm.teach.helpers import device

NEEDS = ("# needs triton", '@extends("pagedvllm.kernels', '@extends("pagedvllm.attention.triton')
NOT_RUN = "not run: no triton"


def prepare() -> None:
    """Choose, before the first kernel is decorated, where kernels run; print one line that says so.

    Without a GPU they run in the interpreter. Without Triton, cells that need it print "not run: no triton".

    Raises:
        RuntimeError: Triton has been imported already, for a GPU that is not there.
    """
    if find_spec("triton") is None:
        _leave_out()
        print(f"kernels: {NOT_RUN}")
        return
    if device().startswith("cuda"):
        print("kernels: compiled, on the GPU")
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton is imported already: restart the kernel, and call prepare() first")
    os.environ["TRITON_INTERPRET"] = "1"
    # An empty split has a sum of 0, and its logarithm is meant to be minus infinity.
    warnings.filterwarnings("ignore", message="divide by zero encountered in log2")
    print("kernels: in Triton's interpreter, on the CPU")


def without_triton(lines: list[str]) -> list[str]:
    """A cell as it runs where there is no Triton: one that needs it says that it was not run."""
    text = "".join(lines)
    return [f"print({NOT_RUN!r})\n"] if text.startswith(NEEDS) else lines


def _leave_out() -> None:
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is not None and without_triton not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(without_triton)
