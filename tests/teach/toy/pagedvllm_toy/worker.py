"""An engine process."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection


def _main(pipe: Connection, wait: float) -> None:
    from pagedvllm.plugins import announce, load_plugins

    load_plugins()
    announce("toy engine")
    from pagedvllm_toy.kv import BlockPool

    pipe.send([block.index for block in BlockPool(64).allocate(2)])
    time.sleep(wait)


def start(wait: float = 0.0) -> tuple[multiprocessing.process.BaseProcess, list[int]]:
    """Start the process and wait for its first answer; it lives `wait` seconds more."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, wait), daemon=True)
    process.start()
    theirs.close()
    answer = ours.recv()
    if not wait:
        process.join()
    return process, answer
