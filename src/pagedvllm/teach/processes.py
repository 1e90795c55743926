"""Engine processes that this one started and that still run: an edit made now would not reach them.

An engine process announces itself (pagedvllm.plugins.announce): it keeps a lock on a file named by its pid, in the
directory that PAGEDVLLM_ENGINES names. The system frees the lock when the process ends, however it ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from pagedvllm.teach.errors import LiveError

DIRECTORY = "PAGEDVLLM_ENGINES"
_watched: dict[int, Path] = {}  # pid -> directory: a forked process must not remove, or take over, its parent's


def watch() -> None:
    """From now on, engine processes started by this one announce themselves to it."""
    if os.getpid() not in _watched:
        directory = Path(tempfile.mkdtemp(prefix="pagedvllm-engines-"))
        _watched[os.getpid()] = directory
        os.environ[DIRECTORY] = str(directory)
        atexit.register(_remove, os.getpid())


def _remove(pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(_watched[pid], ignore_errors=True)


def alive() -> list[str]:
    """Those that run now, as "role (pid)"."""
    directory = _watched.get(os.getpid())
    return (
        sorted(f"{f.read_text()} (pid {f.name})" for f in directory.glob("[0-9]*") if _locked(f)) if directory else []
    )


def _locked(file: Path) -> bool:
    import fcntl

    with file.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    file.unlink(missing_ok=True)
    return False


def refuse_while_alive() -> None:
    """Raises LiveError, naming them, while engine processes run."""
    if running := alive():
        raise LiveError(f"{', '.join(running)} started before this edit and would not see it: shut it down first")
