"""Run notebooks again, in place: what does not change keeps its bytes.

A cell tagged nbval-ignore-output (times, rates, memory) keeps its stored output as long as its source is the one that
made it; `--remeasure` runs it anew. A cell that raises leaves the file as it was.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pagedvllm.teach import notebooks, roadmap

TIMEOUT = 300  # seconds a cell
STAMP = "source_of_output"  # in the metadata of an ignored cell: the digest of the source that made its output


class CellError(RuntimeError):
    """A cell raised, or printed what must not be published."""


def kernel_environment(source: Path = roadmap.SOURCE) -> dict[str, str]:
    """What every kernel of the book runs with; `source` is the folder that holds the package."""
    chosen = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(source),
        "COLUMNS": "100",
    }
    if not os.environ.get("PAGEDVLLM_MODEL"):  # the embedded model needs no network, so nothing may use it
        chosen["HF_HUB_OFFLINE"] = "1"
    return chosen


def execute(paths: list[Path], remeasure: bool = False) -> int:
    """Run each notebook with the full package. Returns an exit status: 1 when one failed; the others are still run."""
    failed = 0
    for path in paths:
        start = time.monotonic()
        try:
            changed = execute_one(path, remeasure)
        except CellError as error:
            failed = 1
            print(f"{path.name}: not changed. {error}")
            continue
        print(f"{path.name}: {'rewritten' if changed else 'unchanged'}, {time.monotonic() - start:.0f} s", flush=True)
    return failed


def execute_one(path: Path, remeasure: bool = False) -> bool:
    """Run one notebook and write it. Returns whether its bytes changed. Raises CellError: it was not written."""
    before = path.read_bytes()
    notebook = notebooks.read(path)
    stored = [copy.deepcopy(c.outputs) for c in notebooks.code_cells(notebook)]
    run(notebook, path)
    for cell, outputs in zip(notebooks.code_cells(notebook), stored, strict=True):
        ignored = notebooks.IGNORED in notebooks.tags(cell)
        stamp = notebooks.digest(cell.source)
        if ignored and outputs and not remeasure and cell.metadata.get(STAMP) == stamp:
            cell.outputs = outputs
        cell.metadata.pop(STAMP, None)
        if ignored:
            cell.metadata[STAMP] = stamp
    notebooks.normalise(notebook)
    for number, cell in enumerate(notebooks.code_cells(notebook)):
        if reason := _unfit(cell.outputs):
            raise CellError(f"{_name(number, cell)} {reason}")
    if path.read_bytes() != before:
        raise CellError("The file was saved by someone else while it ran: run it again")
    return notebooks.write(path, notebook)


def run(notebook: Any, path: Path) -> None:
    """Fill in the outputs. Raises CellError that names the cell which raised."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisPython(KernelSpecManager):  # the kernel of this environment, whichever kernels the machine has
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])

    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    for cell in notebooks.code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, km=manager, timeout=TIMEOUT, resources=resources, record_timing=False)
    try:
        client.execute(env={**os.environ, **kernel_environment()}, stderr=subprocess.DEVNULL)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise CellError(_where(notebook, error)) from error


def _where(notebook: Any, error: Exception) -> str:
    """Which cell, and what it raised."""
    cells = notebooks.code_cells(notebook)
    for number, cell in enumerate(cells):
        for output in cell.outputs:
            if output.output_type == "error":
                return f"{_name(number, cell)} failed: {output.ename}: {output.evalue}"
    last = max((n for n, c in enumerate(cells) if c.execution_count is not None), default=0)
    return f"{_name(last, cells[last])} or the one after it failed: {type(error).__name__}"


def _name(number: int, cell: Any) -> str:
    first = next(iter(cell.source.splitlines()), "")
    return f"cell {number} ({cell.id}: {first[:60]})"


def _unfit(outputs: list[Any]) -> str:
    """Why outputs must not be published: warnings, or a path of this machine; "" when they may."""
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            return f"writes to stderr: {output.text.strip()[:200]}"
        texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if not k.startswith("image/"))]
        for text in (t for t in texts if isinstance(t, str)):
            for place in (roadmap.ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir())):
                if len(str(place)) > 3 and re.search(re.escape(str(place)) + r"\b", text):
                    return "shows a path of this machine"
    return ""
