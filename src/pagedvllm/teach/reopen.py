"""Compiling live definitions as their home would, and reopening a class in place.

A method is compiled inside `class Owner:` so that `super()`, `__class__`, `__name` mangling, `@x.setter` and defaults
that name a class constant mean what they mean in the file.
"""

from __future__ import annotations
import __future__ as future_flags

import abc
import ast
import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any, cast

from pagedvllm.teach import pieces
from pagedvllm.teach.cells import is_partial
from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.pieces import Home
from pagedvllm.teach.surgery import Surgery, cell_value, functions

RESTART = "edit the file and restart the kernel"
# Class attributes that the type itself keeps, and that a reopened class therefore does not set.
OWN = {"__dict__", "__weakref__", "__module__", "__qualname__", "__slots__", "__abstractmethods__", "_abc_impl"}

WRITTEN_BY_PYTHON = {"__module__", "__qualname__", "__firstlineno__", "__static_attributes__"}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Runs statements of a cell with the globals, the `__future__` flags and the file name that they need."""

    home: Home
    module: types.ModuleType
    filename: str

    def run(self, body: list[ast.stmt], **extra: Any) -> dict[str, Any]:
        """What the statements define. Nothing is written to the module."""
        scratch: dict[str, Any] = dict(extra)
        tree = ast.fix_missing_locations(ast.Module(body, []))
        code = compile(tree, self.filename, "exec", self._flags(), dont_inherit=True)
        exec(code, self.module.__dict__, scratch)
        return {k: v for k, v in scratch.items() if k not in extra}

    def _flags(self) -> int:
        flags = 0
        for stmt in self.home.tree.body:
            if isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__":
                for alias in stmt.names:
                    flags |= getattr(future_flags, alias.name).compiler_flag
        return flags

    def members(self, owner: type, node: ast.ClassDef) -> tuple[dict[str, Any], tuple[type, ...]]:
        """What the body of a class statement defines, as `owner`'s; and the bases it names."""
        capture = _Capture(owner)
        named = [k for k in node.keywords if k.arg != "metaclass"]
        tree = _class(owner.__name__, node.body, node.bases, [*named, _metaclass("__capture__")])
        for outer in reversed(owner.__qualname__.split(".")[:-1]):  # for the qualified name only
            tree = _class(outer, [tree], keywords=[_metaclass("__outer__")])
        self.run([ast.copy_location(tree, node.body[0])], __capture__=capture, __outer__=_Outer(capture))
        return capture.found, capture.bases


def _class(name: str, body: list[Any], bases: Iterable[Any] = (), keywords: Iterable[Any] = ()) -> ast.ClassDef:
    tree: Any = ast.ClassDef(name=name, bases=list(bases), keywords=list(keywords), body=body, decorator_list=[])
    tree.type_params = []  # asked for from Python 3.12 on
    return ast.copy_location(cast("ast.ClassDef", tree), body[0])


def _metaclass(name: str) -> ast.keyword:
    return ast.keyword("metaclass", ast.Name(name, ast.Load()))


class _Outer:
    """A "metaclass" for the classes around: their bodies only have to find the two metaclasses. Makes no class."""

    def __init__(self, capture: _Capture) -> None:
        self.capture = capture

    def __prepare__(self, name: str, bases: tuple[type, ...]) -> dict[str, Any]:
        return {"__capture__": self.capture, "__outer__": self}

    def __call__(self, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None: ...


class _Capture:
    """A "metaclass" that collects the body of a class statement and hands back the class that exists already."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.found: dict[str, Any] = {}
        self.bases: tuple[type, ...] = ()

    def __prepare__(self, name: str, bases: tuple[type, ...], **keywords: Any) -> _Body:
        return _Body(self.owner)

    def __call__(self, name: str, bases: tuple[type, ...], body: _Body, **keywords: Any) -> type:
        self.found = {k: v for k, v in body.items() if k in body.written - WRITTEN_BY_PYTHON}
        self.bases = bases or (object,)
        if "__classcell__" in self.found:
            self.found.pop("__classcell__").cell_contents = self.owner
        return self.owner


class _Body(dict[str, Any]):
    """The namespace of a class body: sees the owner's attributes, remembers what was written."""

    def __init__(self, owner: type) -> None:
        hidden = ("__dict__", "__weakref__", "__annotations__")
        super().__init__({k: v for k, v in vars(owner).items() if k not in hidden})
        self.written: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)


# ---------------------------------------------------------------- one method


def put_method(surgery: Surgery, compiler: Compiler, owner: type, node: ast.stmt) -> None:
    """Install one method, property, accessor, static or class method. `node` has no `extends` decorator any more."""
    name = mangled(owner, pieces.key(node).split(".")[0])
    made = compiler.members(owner, _class(owner.__name__, [node]))[0][name]
    surgery.also(functools.partial(abc.update_abstractmethods, owner))
    surgery.put(owner, name, _with_other_accessors(vars(owner).get(name), made))
    abc.update_abstractmethods(owner)  # does nothing where there are none


def mangled(owner: type, name: str) -> str:
    """The attribute that `name` stands for inside the class."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if private else name


def _with_other_accessors(old: Any, made: Any) -> Any:
    """A getter that is shown alone keeps the setter, and so on."""
    if isinstance(made, property) and isinstance(old, property):
        return property(made.fget or old.fget, made.fset or old.fset, made.fdel or old.fdel, made.__doc__)
    return made


# ---------------------------------------------------------------- a class


def reopen(surgery: Surgery, compiler: Compiler, owner: type, node: ast.ClassDef) -> None:
    """A whole class, or the shown part of it, in place: subclasses and instances keep the one class object."""
    name = owner.__name__
    if type(owner) not in (type, abc.ABCMeta) or (issubclass(owner, tuple) and hasattr(owner, "_fields")):
        kind = "NamedTuple" if issubclass(owner, tuple) else type(owner).__name__.strip("_")
        raise LiveError(f"{name} is made by {kind}: its methods can be live, the class cannot; {RESTART}")
    if "__dataclass_fields__" in vars(owner):
        new, bases, outside = _dataclass_members(compiler, owner, node)
    else:
        new, bases = compiler.members(owner, node)
        outside = node.decorator_list
    if new.get("__slots__") != vars(owner).get("__slots__"):
        raise LiveError(f"the slots of {name} cannot change: {RESTART}")
    if bases != owner.__bases__:
        raise LiveError(f"the bases of {name} cannot change: {RESTART}")
    partial = is_partial(node)
    if "__eq__" in new:
        new.setdefault("__hash__", vars(owner).get("__hash__") if partial else None)  # as `class` itself does
    if partial:
        new = {k: _with_other_accessors(vars(owner).get(k), v) for k, v in new.items()}
        new["__annotations__"] = {**vars(owner).get("__annotations__", {}), **new.get("__annotations__", {})}
    _write(surgery, owner, new, keep_others=partial)
    surgery.keep(owner)
    if _decorated(compiler, owner, outside) is not owner:  # a registry's decorator, say
        raise LiveError(f"a decorator of {name} replaces the class: {RESTART}")


def _write(surgery: Surgery, owner: type, new: dict[str, Any], keep_others: bool) -> None:
    is_slot = types.MemberDescriptorType
    surgery.also(functools.partial(abc.update_abstractmethods, owner))
    for name, value in new.items():
        if name not in OWN and not isinstance(value, is_slot):
            surgery.put(owner, name, value)
    if not keep_others:
        for name in set(vars(owner)) - set(new) - OWN - {"__doc__", "__annotations__"}:
            if not isinstance(vars(owner)[name], is_slot):
                surgery.drop(owner, name)
    abc.update_abstractmethods(owner)  # does nothing where there are none


def _decorated(compiler: Compiler, cls: type, decorators: list[ast.expr]) -> Any:
    """What the decorators make of a class."""
    start: ast.expr = ast.Name("__cls__", ast.Load())
    call = functools.reduce(lambda x, d: ast.copy_location(ast.Call(d, [x], []), d), reversed(decorators), start)
    statement = ast.copy_location(ast.Assign([ast.Name("made", ast.Store())], call), call)
    return compiler.run([ast.fix_missing_locations(statement)], __cls__=cls)["made"] if decorators else cls


def _dataclass_members(
    compiler: Compiler, owner: type, node: ast.ClassDef
) -> tuple[dict[str, Any], tuple[type, ...], list[ast.expr]]:
    """What `@dataclass` makes of the cell, its bases, and the decorators other than `@dataclass`.

    A donor class is decorated and then taken apart, since what `@dataclass` generates refers to the class it decorates.
    """
    theirs = compiler.home.find(node.name)
    hidden: set[str] = set()
    if isinstance(theirs, ast.ClassDef):
        _check_fields(owner, node, theirs)
        if is_partial(node):  # `@dataclass` must see a __post_init__ or an __eq__ that the cell does not show
            hidden = {pieces.key(s).split(".")[0] for s in theirs.body} & set(vars(owner))
    members, bases = compiler.members(owner, node)
    body = {k: vars(owner)[k] for k in hidden} | members
    body |= {"__module__": owner.__module__, "__qualname__": owner.__qualname__}
    outside = [d for d in node.decorator_list if "dataclass" not in ast.unparse(d).split("(")[0]]
    inside = [d for d in node.decorator_list if d not in outside]
    donor = _decorated(compiler, type(owner)(owner.__name__, bases, body), inside)
    new = dict(vars(donor))
    for function in (f for value in new.values() for f in functions(value)):
        for cell in function.__closure__ or ():  # the `cls` of what `@dataclass` generated
            kept = cell_value(cell)
            if isinstance(kept, type) and kept.__qualname__ == owner.__qualname__ and kept is not owner:
                cell.cell_contents = owner
    return new, bases, outside


def _check_fields(owner: type, node: ast.ClassDef, theirs: ast.ClassDef) -> None:
    """Fields that changed must reach every instance and every child; where they cannot, say so."""
    old, new = ([ast.unparse(f) for f in pieces.fields(c)] for c in (theirs, node))
    if is_partial(node):
        missing = {pieces.key(f) for f in pieces.fields(theirs)} - {pieces.key(f) for f in pieces.fields(node)}
        if missing:
            raise LiveError(f"{node.name}: a dataclass shows all its fields in one cell, without {min(missing)}")
    if old != new and any("__dataclass_fields__" in vars(c) for c in _descendants(owner)):
        raise LiveError(f"dataclasses derived from {node.name} copied its fields: {RESTART}")


def _descendants(cls: type[Any]) -> list[type[Any]]:
    direct = [c for c in cls.__subclasses__() if c.__name__ != cls.__name__]  # not an earlier edit's donor
    return direct + [grandchild for child in direct for grandchild in _descendants(child)]
