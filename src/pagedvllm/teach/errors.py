"""What the live cells raise."""

from __future__ import annotations


class LiveError(RuntimeError):
    """This cell cannot be applied to the running package, or to its text. The package is as it was."""
