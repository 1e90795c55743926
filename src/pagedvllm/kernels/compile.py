"""Kernels compiled ahead of time, for cards that are not here: what each would occupy.

Triton and ptxas need no GPU. What is compiled is what the engine would launch, taken down
from its own calls on tensors without memory (device "meta").
vLLM has no counterpart; Triton: tools/compile.py.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from pagedvllm.kernels.launch import INTERPRETED, Launch, triton

# Shared memory that one program may use, in KiB, for each compute capability (sm_75 and so
# on). CUDA programming guide, "Compute Capabilities".
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
WITHOUT_SPILLS = (80, 86, 89, 90)  # the cards that tile sizes are chosen for
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Compiled:
    """What one program of a kernel takes."""

    kernel: str
    target: int
    shared: int  # bytes
    registers: int  # for each thread
    spills: int  # bytes stored to and loaded from local memory, for each thread

    def faults(self) -> list[str]:
        """What keeps it from running, or from running well."""
        found, limit = [], SHARED_KIB[self.target] * 1024
        if self.shared > limit:
            found.append(
                f"{self.shared} bytes of shared memory, sm_{self.target} has {limit}"
            )
        if self.spills and self.target in WITHOUT_SPILLS:
            found.append(f"{self.spills} bytes of registers spilled on sm_{self.target}")
        return found


def compile_launch(call: Launch, target: int) -> Compiled:
    """Compile what `call` would start, for compute capability `target`.

    Raises:
        RuntimeError: kernels were decorated for the interpreter, or ptxas has failed.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: interpreted kernels are not compiled")
    kernel, constants = call.kernel, dict(call.constants)
    names = ("num_warps", "num_stages")
    options = {name: constants.pop(name) for name in names if name in constants}
    values = {(kernel.arg_names.index(name),): v for name, v in constants.items()}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    hints = {}
    for i, (parameter, value) in enumerate(
        zip(kernel.params, call.arguments, strict=False)
    ):
        signature[parameter.name] = _type_of(value)
        if not parameter.do_not_specialize and _divisible(value):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, hints)
    binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spills = _resources(binary.asm["ptx"], target)
    return Compiled(kernel.fn.__name__, target, binary.metadata.shared, registers, spills)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _divisible(value: Any) -> bool:
    """By 16, as the launcher would find: the start of every tensor of torch is."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(ptx: str, target: int) -> tuple[int, int]:
    """(registers, bytes spilled) as ptxas reports them."""
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [
            get_ptxas(target).path,
            "-v",
            "--gpu-name",
            found[1],
            "-o",
            f"{path}.cubin",
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas for {found[1]}: {done.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert registers is not None
    return int(registers[1]), sum(map(int, spills))
