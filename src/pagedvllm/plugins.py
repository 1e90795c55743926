"""Late binding: the only two places where the package finds code by name.

vLLM: `resolve_obj_by_qualname` in utils/import_utils.py, `load_general_plugins` in
plugins/__init__.py.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def resolve(name: str, kind: type[T]) -> type[T]:
    """The class that `module:Class` stands for, checked against the protocol (or base
    class) it must fulfil.

    Raises:
        ValueError: the name is not of the form `module:Class`, or the module has no such
            class.
        ModuleNotFoundError: this build of the package has no such module.
        TypeError: the class lacks a member of the protocol, which the message names.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"{name!r} is not of the form 'module:Class'")
    if not _exists(module):
        raise ModuleNotFoundError(f"{name}: there is no module {module}", name=module)
    found = getattr(import_module(module), attribute, None)
    if found is None:
        raise ValueError(f"{name}: module {module} has no {attribute}")
    missing = [member for member in _members(kind) if not hasattr(found, member)]
    if not isinstance(found, type) or missing:
        lacks = f": it lacks {', '.join(missing)}" if missing else ""
        raise TypeError(f"{name} is not a {kind.__name__}{lacks}")
    return found


def resolve_from(table: dict[str, str], name: str, kind: type[T]) -> type[T]:
    """The class that a short name of a table, or `module:Class`, stands for."""
    return resolve(table.get(name, name), kind)


def _exists(module: str) -> bool:
    if module in sys.modules:  # also a notebook's own classes, as "__main__:Class"
        return True
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _members(kind: type[Any]) -> list[str]:
    """The methods that a protocol asks for (data members of a protocol are set by
    `__init__`, so a class has none).
    """
    return sorted(
        name
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    )


def load_plugins() -> None:
    """Call `register()` of every module named in PAGEDVLLM_PLUGINS. Each engine process
    does this first.
    """
    for name in filter(None, os.environ.get("PAGEDVLLM_PLUGINS", "").split(",")):
        import_module(name).register()


def announce(role: str) -> None:
    """Let the process that started this one know that it runs. Each engine process calls it
    once, with its role.

    A file in the directory PAGEDVLLM_ENGINES, named by the pid and locked: the system frees
        the lock at the end of the process, however it ends. Without that variable nobody
        asks, and nothing happens.
    """
    directory = os.environ.get("PAGEDVLLM_ENGINES", "")
    if not os.path.isdir(directory):
        return
    import fcntl

    path = os.path.join(directory, str(os.getpid()))
    file = os.open(
        f"{directory}/new-{os.getpid()}", os.O_CREAT | os.O_WRONLY
    )  # open for life
    os.write(file, role.encode())
    fcntl.flock(file, fcntl.LOCK_EX)
    os.replace(f"{directory}/new-{os.getpid()}", path)
