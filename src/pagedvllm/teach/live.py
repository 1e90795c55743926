"""Live source cells: the code in a notebook cell *is* the code of the running package.

    @extends("pagedvllm.sample.sampler:Sampler")        # a method, property, static or class method
    def sample(self, logits): ...

    @extends("pagedvllm.model.layers")                  # a function or a class of that module
    class RMSNorm(nn.Module): ...

    with extends("pagedvllm.model.layers"):             # constants
        EPS = 1e-6

The *home* (module, or module:Class) says where the definition lives; its name is the definition's own. In IPython an
AST transformer hands the untouched text to `install`, so names in decorators, defaults and annotations resolve in the
home module and the notebook needs no imports. A cell equal to the package does nothing at all.

The state is the package as imported plus an ordered list of edits; `restore` undoes all and replays the rest.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import json
import linecache
import os
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pagedvllm.teach import cells, pieces, processes
from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.pieces import Home
from pagedvllm.teach.reopen import Compiler, put_method, reopen
from pagedvllm.teach.surgery import Surgery, forget_compiled_kernels

EDITS = "PAGEDVLLM_LIVE_EDITS"  # the edits, as JSON, for the processes that this one starts
PLUGINS = "PAGEDVLLM_PLUGINS"  # read by pagedvllm.plugins
ROOTS = {"pagedvllm"}  # the packages that cells may edit
ALWAYS = "PAGEDVLLM_LIVE"  # "always": install a cell that equals the package, too
# What each file held when this process first saw it: one that holds something else is not what was imported. (The time
# of a file would say less: clocks step, and a file may be written again as it was.)
_imported = {file: file.read_bytes() for file in Path(__file__).parents[1].rglob("*.py")}


@dataclass(frozen=True)
class Edit:
    """One live definition as a cell had it."""

    home: str
    name: str  # `name` or `name.setter`: see pieces.key
    cell: str  # the whole text of the cell: line numbers stay right
    filename: str
    line: int  # 1-based, of the `extends` call
    same: bool = False  # equal to the package: installed because the file is newer, or by PAGEDVLLM_LIVE=always

    @property
    def label(self) -> str:
        return f"{self.home}{'.' if ':' in self.home else ':'}{self.name}"


_surgery = Surgery()
_edits: list[Edit] = []  # in the order of installation
_ends: list[int] = []  # how many changes of _surgery there were after each edit
_history: list[str] = []  # labels of all that cells have installed since the kernel started


# ---------------------------------------------------------------- from the notebook


class extends:
    """The decorator, and the `with` block, of live cells."""

    def __init__(self, home: str) -> None:
        self.home = home

    def __call__(self, definition: Any) -> Any:
        raise LiveError("a live cell needs IPython, and stands alone, in a later cell than the import of `extends`")

    def __enter__(self) -> None:
        self(None)

    def __exit__(self, *exc: object) -> None: ...

    def _cell(self, line: int) -> Any:
        filename = sys._getframe(1).f_code.co_filename
        return install(self.home, "".join(linecache.getlines(filename)), filename, line)

    @staticmethod
    def _refuse(reason: str) -> None:
        raise LiveError(reason)


class CellTransformer(ast.NodeTransformer):
    """`@extends(home) def f` -> `f = extends(home)._cell(line)`; nothing of the definition runs in the notebook."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace

    def is_live(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and self.namespace.get(node.func.id) is extends
        )

    def visit_Module(self, module: ast.Module) -> ast.Module:
        if reason := cells.misuse(module, self.is_live):
            call = next(n for n in ast.walk(module) if isinstance(n, ast.Call) and self.is_live(n))
            module.body = [_statement(call.func, "_refuse", reason, call)]
        else:
            module.body = [self._live(stmt) for stmt in module.body]
        return ast.fix_missing_locations(module)

    def _live(self, stmt: ast.stmt) -> ast.stmt:
        call = cells.live_call(stmt)
        if not isinstance(call, ast.Call) or not self.is_live(call):
            return stmt
        new = _statement(call, "_cell", call.lineno, stmt)
        if ":" in cells.live(stmt).home or isinstance(stmt, ast.With):
            return new  # binds nothing: `def next`, `def hash`, `def __getattr__` would hurt the notebook
        name = ast.Name(pieces.key(stmt), ast.Store())
        return ast.copy_location(ast.Assign([name], new.value), stmt)


def _statement(target: ast.expr, method: str, argument: str | int, where: ast.AST) -> ast.Expr:
    call = ast.Call(ast.Attribute(target, method, ast.Load()), [ast.Constant(argument)], [])
    return ast.copy_location(ast.Expr(call), where)


def load_ipython_extension(shell: Any) -> None:
    """Let live cells work in this shell. Once is enough, more does no harm."""
    if not any(isinstance(t, CellTransformer) for t in shell.ast_transformers):
        shell.ast_transformers.append(CellTransformer(shell.user_ns))
    processes.watch()


# ---------------------------------------------------------------- install and restore


def install(home: str, cell: str, filename: str, line: int) -> Any:
    """Make the live statement at that line of a cell part of the running package.

    Returns the function or class when the home is a module. Raises LiveError when that cannot be; then nothing changes.
    """
    if (
        reason := cells.misuse(ast.parse(cell))
        if cell
        else "IPython does not give the text of this cell: no magic above it"
    ):
        raise LiveError(reason)
    stmt = _at(cell, filename, line)
    statement = cells.live(stmt)
    if home.partition(":")[0].split(".")[0] not in ROOTS:
        raise LiveError(f"{home!r} is not a home of this package: a live cell edits {' and '.join(sorted(ROOTS))} only")
    Home.read(home).body()  # raises LiveError when there is no such module or class
    same = {pieces.key(d): cells.same_as_package(statement, d, cell) for d in statement.body}
    _install([Edit(home, name, cell, filename, line, equal) for name, equal in same.items()])
    if ":" in home or isinstance(stmt, ast.With):
        return None
    return getattr(importlib.import_module(home), pieces.key(stmt))


def _at(cell: str, filename: str, line: int) -> ast.stmt:
    """The statement of a cell at a line, parsed afresh: who compiles it takes it apart."""
    body = ast.parse(cell, filename).body
    return next(s for s in body if pieces.first_line(s) <= line <= pieces.last_line(s))


def _install(new: list[Edit]) -> None:
    labels = {e.label for e in new}
    kept = [e for e in _edits if e.label not in labels]
    always = os.environ.get(ALWAYS) == "always"
    needed = [e for e in new if not e.same or always or _newer_on_disk(e)]
    if not needed and len(kept) == len(_edits):
        return  # the cell says what the package says
    if len(kept) < len(_edits) or any(not e.same or _newer_on_disk(e) for e in needed):
        processes.refuse_while_alive()
    _become([*kept, *needed])
    _history.extend(e.label for e in needed)
    for edit in new:
        if line := _report(edit, edit in needed):
            print(f"live: {edit.label} {line}")


def _report(edit: Edit, installed: bool) -> str:
    """What the reader must know about a cell that was run."""
    if not installed:
        return "is the package's own again"
    if edit.same:
        return "is reloaded: its file is newer than this kernel" if _newer_on_disk(edit) else ""
    home = Home.read(edit.home)
    if home.find(edit.name) is None:
        if close := difflib.get_close_matches(edit.name, _names(home), 1, 0.75):
            return f"is new: the package has no {edit.name}; did you mean {close[0]}? (restore() takes this away)"
        return "is new: the package has no such definition (restore() takes it away)"
    if _newer_on_disk(edit):
        return "is this cell's: the package's file has other, newer code (`make sync` brings it here)"
    return "now differs from the package (restore() undoes it)"


def _names(home: Home) -> list[str]:
    """What a home defines, accessors aside."""
    return [n for n in map(pieces.key, home.body()) if n.isidentifier()]


def restore(home: str | None = None, name: str | None = None) -> None:
    """Back to the package's own code: everything, or one home, or one definition (also by its label in `edits()`).

    Says so when there is nothing to restore.

    Raises LiveError when there is no such edit, or when another one cannot stand without it; then nothing changes.
    """
    kept = [e for e in _edits if not _matches(e, home, name)]
    if home is not None and len(kept) == len(_edits):
        raise LiveError(f"there is no edit of {home}{' ' + name if name else ''}; edits() names those there are")
    if not _edits:
        print("restore: no edit is installed")
    if len(kept) < len(_edits):
        processes.refuse_while_alive()
        try:
            _become(kept)
        except Exception as error:
            raise LiveError(f"a later edit needs this one ({error}); restore() undoes all") from error


def _matches(edit: Edit, home: str | None, name: str | None) -> bool:
    if home is None or home == edit.label:
        return True
    if name is None:
        return edit.home == home or edit.home.startswith(home + ":")
    return edit.home == home and name in (edit.name, edit.name.split(".")[0])


def edits() -> list[str]:
    """The labels of the definitions that differ from the imported package, in the order of installation."""
    return [e.label for e in _edits]


def history() -> list[str]:
    """The labels of all definitions that cells have installed since the kernel started, restored ones included."""
    return list(_history)


def register() -> None:
    """The plugin's entry point: called once in each engine process (pagedvllm.plugins), before it does anything."""
    sent = [Edit(*values) for values in json.loads(os.environ.get(EDITS, "[]"))]
    for edit in sent:
        linecache.cache[edit.filename] = (len(edit.cell), None, edit.cell.splitlines(True), edit.filename)
    _move([*_edits, *(e for e in sent if e not in _edits)])  # a forked process has them already


def _become(target: list[Edit]) -> None:
    """Move to that state of the package; on failure stay as before."""
    before = list(_edits)
    try:
        _move(target)
    except BaseException:
        _move(before)
        raise
    finally:
        _publish()


def _move(target: list[Edit]) -> None:
    """Undo edits, last first, until what is left is the start of `target`; then apply the rest of it."""
    same = 0
    while same < min(len(target), len(_edits)) and target[same] == _edits[same]:
        same += 1
    _surgery.roll_back(_ends[same - 1] if same else 0)
    del _edits[same:], _ends[same:]
    for edit in target[same:]:
        _apply(edit)
        _edits.append(edit)
        _ends.append(len(_surgery))


def _apply(edit: Edit) -> None:
    module = importlib.import_module(edit.home.partition(":")[0])
    home = Home.read(edit.home)
    stmt = _at(edit.cell, edit.filename, edit.line)
    compiler = Compiler(home, module, edit.filename)
    _surgery.also(functools.partial(forget_compiled_kernels, module))
    owner: Any = functools.reduce(getattr, home.cls.split("."), module) if home.cls else module
    if isinstance(stmt, ast.With):
        constant = next(s for s in stmt.body if pieces.key(s) == edit.name)
        _surgery.put(module, edit.name, compiler.run([constant])[edit.name])
        return
    assert isinstance(stmt, pieces.Def)
    del stmt.decorator_list[0]
    if isinstance(stmt, ast.ClassDef) and isinstance(existing := vars(owner).get(stmt.name), type):
        reopen(_surgery, compiler, existing, stmt)
    elif home.cls:
        put_method(_surgery, compiler, owner, stmt)
    else:
        _surgery.put(module, stmt.name, compiler.run([stmt])[stmt.name])


def _newer_on_disk(edit: Edit) -> bool:
    file = pieces.source_file(edit.home.partition(":")[0])
    now = file.read_bytes()
    return _imported.setdefault(file, now) != now


def _publish() -> None:
    """Tell the processes that this one will start. What equals the package need not travel."""
    changed = [astuple(e) for e in _edits if not e.same]
    plugins = [p for p in os.environ.get(PLUGINS, "").split(",") if p and p != __name__]
    _set_variable(EDITS, json.dumps(changed) if changed else "")
    _set_variable(PLUGINS, ",".join([*plugins, __name__] if changed else plugins))


def _set_variable(name: str, value: str) -> None:
    os.environ[name] = value
    if not value:
        del os.environ[name]
