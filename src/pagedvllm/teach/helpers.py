"""Small things that most chapters use: the first cell, deliberate errors, clear margins."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Set before transformers is imported, so that no output holds a progress bar or a machine's warning.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def setup() -> None:
    """Print one line on device, model and versions; on Colab, first install what is missing."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "google.colab" in sys.modules:
        from pagedvllm.teach.colab import install

        install()
    import torch

    import pagedvllm
    from pagedvllm.hub import EMBEDDED_MODEL

    model = Path(os.environ.get("PAGEDVLLM_MODEL") or EMBEDDED_MODEL).name
    versions = f"pagedvllm {pagedvllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"device: {device()} | model: {model} | {versions}")


def device() -> str:
    """The device that the notebooks run on: PAGEDVLLM_DEVICE, else a CUDA card, else the CPU; a card with its name."""
    import torch

    chosen = os.environ.get("PAGEDVLLM_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return f"{chosen} ({torch.cuda.get_device_name(chosen)})" if chosen.startswith("cuda") else chosen


@contextmanager
def show_error(kind: type[BaseException] = Exception, width: int = 0) -> Iterator[None]:
    """Print the type and message of an error that the cell makes on purpose (a traceback would show paths).

    width: columns after which a long message goes on in the next line; 0: never.

    Raises:
        AssertionError: there was no error. Errors of another kind than `kind` come through.
    """
    try:
        yield
    except kind as error:
        message = f"{type(error).__name__}: {error}"
        print(textwrap.fill(message, width) if width else message)
    else:
        raise AssertionError("this cell was meant to raise an error, and did not")


def margin_ok(logits: Iterable[Any], least: float = 0.05) -> bool:
    """Is the best logit of each greedy step clear of the next one? Then every machine picks the same tokens.

    Args:
        logits: for each step a tensor or a sequence of vocab numbers; [steps, vocab] is one, too.
        least: smallest difference allowed between the two best.

    Raises:
        ValueError: there is no step.
        AssertionError: a step is too close; the message says which, and how close.
    """
    margins = []
    for row in logits:
        values = row.flatten().tolist() if hasattr(row, "flatten") else list(row)
        best, second = sorted(values)[-1:-3:-1]
        margins.append(best - second)
    if not margins:
        raise ValueError("logits hold no step")
    step = min(range(len(margins)), key=margins.__getitem__)
    assert margins[step] >= least, f"step {step}: the two best logits are {margins[step]:.4f} apart, less than {least}"
    return True


def installed(package: str) -> str:
    """The version of an installed package, "" when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
