"""Ctrl-C between two steps, never in the middle of one.

Half of a step is no state: the scheduler may have counted tokens that nobody has received.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT back until the block is done. Pressed again, it does not wait.

    Only the main thread gets signals: elsewhere nothing happens.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if pressed:
            usual(number, frame)
        pressed.append((number, frame))

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        usual(*pressed[0])
