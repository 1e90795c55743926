"""Without the interpreter: a kernel that calls an edited helper must be compiled anew. Compiling needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton", reason="no Triton on this system")

SCRIPT = textwrap.dedent("""
    import json, os, textwrap
    from IPython.core.interactiveshell import InteractiveShell
    from pagedvllm.teach import extends, live, restore
    shell = InteractiveShell.instance()
    shell.user_ns["extends"] = extends
    live.ROOTS.add("pagedvllm_toy")
    live.load_ipython_extension(shell)
    import triton
    from pagedvllm_toy import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled():
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        source = ASTSource(kernels.add_kernel, signature, {(3,): 64})
        return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ttir"]

    if os.environ.get("FORGET") == "no":
        live.forget_compiled_kernels = lambda module: None
    texts = [compiled()]
    cell = '@extends("pagedvllm_toy.kernels")\\n@triton.jit\\ndef _twist(x):\\n    return x + 7\\n'
    shell.run_cell(cell).raise_error()
    texts.append(compiled())
    restore()
    texts.append(compiled())
    print(json.dumps(["1.000000e+00" in t for t in texts]))
""")


@pytest.mark.parametrize(("forget", "first_constant"), [("yes", "[true, false, true]"), ("no", "[true, true, true]")])
def test_an_edited_helper_reaches_its_callers(toy, tmp_path, forget, first_constant):
    """With the old compiled kernels kept, the edit would not be seen: that is what clearing them is for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"FORGET": forget, "TRITON_CACHE_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(toy), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == first_constant
