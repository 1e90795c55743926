"""Replacing one object of the running package, so that whoever holds the old one sees the new code; and undoing it.

A function keeps its identity: its code, defaults and closure are exchanged in place. Imports by name, registries, bound
methods and compiled callers then follow by themselves. What cannot be exchanged in place (an `lru_cache`, a Triton
kernel, a constant) is rebound wherever the package and the notebook hold it.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedvllm.teach.errors import LiveError

MISSING: Any = object()
PLAIN = (int, float, complex, str, bytes, bool, tuple, frozenset, type(None))  # equal values are often one object
_ATTRIBUTES = ("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__type_params__")


class Surgery:
    """Changes made to one package, and how to undo them, last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def roll_back(self, mark: int = 0) -> None:
        """Undo all changes made since there were `mark` of them."""
        while len(self._undo) > mark:
            self._undo.pop()()

    def also(self, action: Callable[[], object]) -> None:
        """Do something now, and again when what follows is undone."""
        self._undo.append(action)
        action()

    def put(self, holder: Any, name: str, new: Any) -> None:
        """Make `new` the attribute `name` of a module or class."""
        old = holder.__dict__.get(name, MISSING)
        if old is new:
            return
        _refuse_another_kind(name, old, new)
        if old is not MISSING and self._exchange(old, new):
            mark = len(self)
            self._rebind(holder, new, old)  # a decorator may have put the new function into a registry
            del self._undo[mark:]  # and it must not come back
            return
        setattr(holder, name, new)
        if hasattr(type(new), "__set_name__") and isinstance(holder, type):
            type(new).__set_name__(new, holder, name)  # cached_property; setattr does not do it
        self._undo.append(lambda: delattr(holder, name) if old is MISSING else setattr(holder, name, old))
        if old is MISSING:
            return
        if isinstance(old, PLAIN) or isinstance(new, PLAIN):
            self._rebind_constant(holder, name, old, new)
        else:
            self._rebind(holder, old, new)

    def keep(self, holder: type) -> None:
        """Whatever changes in the attributes of a class from now on, undo it."""
        before = dict(vars(holder))

        def undo() -> None:
            for name in set(vars(holder)) - set(before):
                delattr(holder, name)
            for name, value in before.items():
                if vars(holder).get(name, MISSING) is not value:
                    setattr(holder, name, value)

        self._undo.append(undo)

    def drop(self, holder: type, name: str) -> None:
        """Take an attribute away from a class."""
        old = holder.__dict__[name]
        delattr(holder, name)
        self._undo.append(lambda: setattr(holder, name, old))

    def _set_item(self, container: Any, key: Any, new: Any) -> None:
        old = container[key]
        container[key] = new

        def undo() -> None:
            if (
                container[key] if isinstance(container, list) else container.get(key)
            ) is new:  # else it is the reader's
                container[key] = old

        self._undo.append(undo)

    # ------------------------------------------------------------ in place

    def _exchange(self, old: Any, new: Any) -> bool:
        """Give `old` the insides of `new`. False, and nothing done, when their kinds or closures do not allow it."""
        pairs = _function_pairs(old, new)
        if pairs is None or not all(a is b or _exchangeable(a, b) for a, b in pairs):
            return False
        for a, b in pairs:
            if a is not b:
                self._exchange_function(a, b)
        return True

    def _exchange_function(self, old: types.FunctionType, new: types.FunctionType) -> None:
        saved = _insides(old)
        _set_insides(old, *_insides(new))
        self._undo.append(lambda: _set_insides(old, *saved))

    # ------------------------------------------------------------ everywhere else

    def _rebind(self, holder: Any, old: Any, new: Any) -> None:
        """Wherever the package or the notebook holds `old`, let it hold `new`."""
        modules = [*package_of(holder), sys.modules["__main__"]]
        names = {m.__name__ for m in modules}
        for namespace in [m.__dict__ for m in modules]:
            for name, value in list(namespace.items()):
                if value is old:
                    self._set_item(namespace, name, new)
                elif isinstance(value, type) and value.__module__ in names:
                    for attribute in [a for a, member in vars(value).items() if member is old]:
                        setattr(value, attribute, new)
                        self._undo.append(functools.partial(setattr, value, attribute, old))
                else:
                    self._rebind_inside(name, value, old, new)

    def _rebind_inside(self, name: str, value: Any, old: Any, new: Any) -> None:
        """A registry: a dict or a list of the module; a tuple or a set cannot follow."""
        if type(value) not in (dict, list, tuple, set, frozenset) or name.startswith("__"):
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key in [k for k, v in items if v is old]:
            if not isinstance(value, (dict, list)):
                raise LiveError(
                    f"{name} holds the old definition and cannot change: edit the file and restart the kernel"
                )
            self._set_item(value, key, new)

    def _rebind_constant(self, holder: Any, name: str, old: Any, new: Any) -> None:
        """A plain value is found by the imports that name it: equal values need not be the same constant."""
        if isinstance(holder, types.ModuleType):
            for module in package_of(holder):
                for alias in _imports(module).get((holder.__name__, name), ()):
                    if module.__dict__.get(alias, MISSING) is old:
                        self._set_item(module.__dict__, alias, new)


def package_of(holder: Any) -> list[types.ModuleType]:
    """The loaded modules of the package that a module or a class belongs to."""
    name = holder.__name__ if isinstance(holder, types.ModuleType) else holder.__module__
    root = name.split(".")[0]
    return [m for n, m in list(sys.modules.items()) if m is not None and (n == root or n.startswith(root + "."))]


@functools.cache
def _imports(module: types.ModuleType) -> dict[tuple[str, str], list[str]]:
    """(module, name) -> the names under which `from module import name [as alias]` binds it."""
    found: dict[tuple[str, str], list[str]] = {}
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py"):
        return found
    package = module.__name__.split(".") if file.endswith("__init__.py") else module.__name__.split(".")[:-1]
    for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for a in node.names:
                found.setdefault((source, a.name), []).append(a.asname or a.name)
    return found


# ---------------------------------------------------------------- kinds

_KINDS = (property, functools.cached_property, staticmethod, classmethod)  # each is the decorator of that name


def kind(value: Any) -> str:
    """What a definition is to those who use it; "" when that cannot be told."""
    for decorator in _KINDS:
        if isinstance(value, decorator):
            return decorator.__name__
    if isinstance(value, type):
        return "class"
    if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
        return "function"  # a plain one, or a wrapper such as lru_cache's
    if isinstance(value, (*PLAIN, list, dict, set)) and value is not None:
        return "constant"
    return ""


def _refuse_another_kind(name: str, old: Any, new: Any) -> None:
    """A property that becomes a method would be silently true wherever it is asked for."""
    was, would_be = kind(old), kind(new)
    if was == would_be or not was or not would_be:
        return
    marks = [d.__name__ for d in _KINDS]
    if was in marks:
        advice = f"keep @{was}"
    elif would_be in marks:
        advice = f"leave out @{would_be}"
    else:
        advice = f"the cell makes it a {would_be}"
    raise LiveError(f"{name} is a {was} in the package: {advice}")


# ---------------------------------------------------------------- functions


def functions(value: Any) -> list[types.FunctionType]:
    """The plain functions in a method, static method, class method or property."""
    if isinstance(value, types.FunctionType):
        return [value]
    if isinstance(value, (staticmethod, classmethod)):
        return functions(value.__func__)
    if isinstance(value, property):
        return [f for g in (value.fget, value.fset, value.fdel) for f in functions(g)]
    return []


def _function_pairs(old: Any, new: Any) -> list[tuple[types.FunctionType, types.FunctionType]] | None:
    """Which function of `old` takes the insides of which function of `new`; None when the kinds differ."""
    if type(old) is not type(new):
        return None
    if isinstance(old, types.FunctionType):
        return [(old, new)]
    if isinstance(old, (staticmethod, classmethod)):
        return _function_pairs(old.__func__, new.__func__)
    if isinstance(old, property):
        pairs: list[tuple[types.FunctionType, types.FunctionType]] = []
        for a, b in ((old.fget, new.fget), (old.fset, new.fset), (old.fdel, new.fdel)):
            if a is b:
                continue
            inner = _function_pairs(a, b)
            if inner is None:
                return None
            pairs += inner
        return pairs
    return None


def _exchangeable(old: types.FunctionType, new: types.FunctionType) -> bool:
    """Same globals, same number of closure cells, and no cell that another function shares and would see change."""
    a, b = old.__closure__ or (), new.__closure__ or ()
    if len(a) != len(b) or old.__globals__ is not new.__globals__:
        return False
    changed = [i for i in range(len(a)) if cell_value(a[i]) is not cell_value(b[i])]
    return not any(_shared(a, i) for i in changed)


def _shared(closure: tuple[types.CellType, ...], i: int) -> bool:
    """Does another closure hold that cell? (`deco = retry(3)` gives all that it decorates one cell for the 3.)"""
    return any(isinstance(holder, tuple) and holder is not closure for holder in gc.get_referrers(closure[i]))


def cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


_Insides = tuple[list[tuple[str, Any]], list[Any], dict[str, Any]]


def _insides(function: types.FunctionType) -> _Insides:
    attributes = [(a, getattr(function, a)) for a in _ATTRIBUTES if hasattr(function, a)]
    return attributes, [cell_value(c) for c in function.__closure__ or ()], dict(function.__dict__)


def _set_insides(
    function: types.FunctionType, attributes: list[tuple[str, Any]], cells: list[Any], extra: dict[str, Any]
) -> None:
    for name, value in attributes:
        setattr(function, name, value)
    for cell, value in zip(function.__closure__ or (), cells, strict=True):
        if value is not cell_value(cell) and value is not MISSING:
            cell.cell_contents = value
    function.__dict__.clear()
    function.__dict__.update(extra)


# ---------------------------------------------------------------- Triton


def forget_compiled_kernels(holder: Any) -> None:
    """A kernel's cache key is computed once, from its source, its helpers' and its constants': an edit must void it."""
    if "triton" not in sys.modules:
        return
    for module in package_of(holder):
        for value in list(vars(module).values()):
            kernel = value
            while kernel is not None and not hasattr(kernel, "device_caches"):
                kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
            if kernel is not None:  # `fn`: under @triton.autotune and @triton.heuristics stands the kernel
                kernel.hash = None
                kernel.used_global_vals = {}
                kernel.device_caches.clear()
