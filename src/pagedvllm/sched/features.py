"""The few places where a feature may have a say in scheduling.

The scheduler asks each in turn, and knows none by name.
Such features are guided decoding (9.3), speculation (9.4), KV connectors (9.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from pagedvllm.request import Request


class Admission(Enum):
    """The answer to: may this waiting request start now?"""

    ADMIT = auto()
    SKIP = auto()  # not yet; it keeps its place, and those behind it may go first
    STOP = auto()  # not yet, and nobody behind it either


class SchedulerFeature:
    """Does nothing: a feature overrides what it needs."""

    def admit(self, request: Request) -> Admission:
        """A waiting request has reached the head of the queue."""
        return Admission.ADMIT

    def extra_tokens(self, request: Request) -> int:
        """Tokens to compute beyond its own: guesses, which the step confirms or not."""
        return 0

    def scheduled(self, request: Request, num_tokens: int) -> None:
        """It computes `num_tokens` tokens in the step that is being put together."""

    def received(self, request: Request, token_ids: Sequence[int]) -> None:
        """These tokens, from the model, have just become part of the request."""

    def finished(self, request: Request) -> bool:
        """It has ended. True: its blocks stay, until `Scheduler.release` frees them."""
        return False
