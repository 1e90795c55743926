"""Reading, writing and normalising the book's notebooks, and the parts that are common to all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat

REPOSITORY = "https://github.com/pagedvllm/pagedvllm"  # as in _config.yml

FIRST_CELL = f"""\
# On Colab this cell fetches the book and its package. Anywhere else it only says where it runs.
import sys

if "google.colab" in sys.modules:
    !git clone --quiet --depth 1 {REPOSITORY}
    sys.path.insert(0, "pagedvllm/src")

from pagedvllm import teach
from pagedvllm.teach import extends, restore

teach.setup()"""

IGNORED = "nbval-ignore-output"
EDITED = "edited"  # a live cell that shows an edit: it differs from the package on purpose
_KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},  # knows the first cell's `!`
}
_KEPT = ("mystnb", "source_of_output", "tags")  # of a cell's metadata


def read(path: Path) -> Any:
    """The notebook (an nbformat.NotebookNode, version 4)."""
    return nbformat.read(path, as_version=4)


def write(path: Path, notebook: Any) -> bool:
    """Write it when its bytes change, at once or not at all. Returns whether they did."""
    nbformat.validate(notebook)
    content = text(notebook)
    if path.exists() and path.read_text("utf-8") == content:
        return False
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return True


def text(notebook: Any) -> str:
    """The content of the file."""
    return str(nbformat.writes(notebook)) + "\n"


def code_cells(notebook: Any) -> list[Any]:
    return [c for c in notebook.cells if c.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def normalise(notebook: Any) -> None:
    """Drop what differs from run to run and from machine to machine; number the code cells."""
    notebook.metadata = nbformat.from_dict(_KERNEL)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: cell.metadata[k] for k in _KEPT if k in cell.metadata})
    for number, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = number
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if output.output_type == "execute_result":
                output.execution_count = number


def _joined(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream, which come as the kernel happens to send them, as one piece."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def digest(source: str) -> str:
    """A short name for a text: which source made a stored output."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]
