"""Live cells as text: which statements are live, what the package would put there, and what is not allowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass

from pagedvllm.teach import pieces
from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.pieces import Home

HOME = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?")


@dataclass(frozen=True)
class Live:
    """One live statement of a cell: a definition, or a `with` block of constants."""

    home: str
    node: ast.stmt

    @property
    def body(self) -> list[ast.stmt]:
        """The definition, or the constants."""
        return self.node.body if isinstance(self.node, ast.With) else [self.node]

    @property
    def start(self) -> int:
        """1-based: the first line below `@extends(...)` or `with extends(...):`."""
        if isinstance(self.node, ast.With):
            return self.node.body[0].lineno
        return (pieces.decorators(self.node)[0].end_lineno or 0) + 1

    def text(self, cell: str) -> str:
        """What the cell shows, without the `extends` line."""
        return "\n".join(cell.split("\n")[self.start - 1 : pieces.last_line(self.node)])


def by_name(node: ast.AST) -> bool:
    """Is this a call of `extends`? Text alone goes by the name; IPython by the object (pagedvllm.teach.live)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "extends"


def live_call(stmt: ast.stmt) -> ast.expr | None:
    """Where the call of `extends` must stand: the first decorator, or the one item of a `with`."""
    if isinstance(stmt, ast.With) and len(stmt.items) == 1:
        return stmt.items[0].context_expr
    return next(iter(pieces.decorators(stmt)), None)


def misuse(tree: ast.Module, is_live: Callable[[ast.AST], bool] = by_name) -> str | None:
    """Why a cell that uses `extends` is no live cell; None when it is one, or does not use `extends` at all."""
    calls = [n for n in ast.walk(tree) if is_live(n)]
    if not calls:
        return None
    for stmt in tree.body:
        call = live_call(stmt)
        if call is None or not is_live(call):
            if any(n in calls for n in ast.walk(stmt)):
                return "`extends` is the first decorator of a definition at the top level, or `with extends(...):`"
            code = ast.unparse(stmt).split("\n")[0]
            return (
                f"a live cell holds live definitions only (no import, no use, no magic): move `{code}` to its own cell"
            )
        calls.remove(call)
        if reason := _wrong(stmt, call):
            return reason
    return "one `extends` for each definition, outside of it" if calls else None


def _wrong(stmt: ast.stmt, call: ast.expr) -> str | None:
    """What is wrong with one live statement, by its form alone."""
    assert isinstance(call, ast.Call)
    argument = call.args[0] if len(call.args) == 1 and not call.keywords else None
    home = argument.value if isinstance(argument, ast.Constant) else None
    if not isinstance(home, str) or not HOME.fullmatch(home):
        return 'extends takes one string: "module" or "module:Class"'
    if isinstance(stmt, ast.With):
        if ":" in home or stmt.items[0].optional_vars is not None:
            return "`with extends(...):` holds the constants of a module, and has no `as`"
        if not all(pieces.constant_name(s) for s in stmt.body):
            return "`with extends(...):` holds constants only, each `NAME = value`"
    return None


def parse(cell: str) -> ast.Module:
    """The cell's tree; lines of IPython magic count as `pass`."""
    try:
        return ast.parse(cell)
    except SyntaxError:
        plain = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in cell.split("\n")]
        return ast.parse("\n".join(plain))


def live_statements(cell: str) -> list[Live]:
    """The live statements of a cell, in order; none when it is not a live cell.

    Raises:
        LiveError: the cell uses `extends`, but not as a live cell does.
    """
    if "extends(" not in cell:
        return []
    tree = parse(cell)
    if reason := misuse(tree):
        raise LiveError(reason)
    return [live(s) for s in tree.body if by_name(live_call(s) or s)]


def live(stmt: ast.stmt) -> Live:
    """The live statement that `misuse` has found nothing wrong with."""
    call = live_call(stmt)
    assert isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant)
    return Live(str(call.args[0].value), stmt)


def wanted(statement: Live) -> tuple[str, list[range]]:
    """What the package would put below the `extends` line, and the package's lines that this shows.

    Raises:
        LiveError: the package has no such definition.
    """
    home, node = Home.read(statement.home), statement.node
    found: list[ast.stmt] = []
    for stmt in statement.body:
        match = home.find(pieces.key(stmt))
        if match is None:
            raise LiveError(f"{statement.home} has no {pieces.key(stmt)}")
        found.append(match)
    if isinstance(node, ast.With):
        text = "\n".join(pieces.indent(pieces.piece(home, s)) for s in found)
        return text, [range(pieces.first_line(s), pieces.last_line(s) + 1) for s in found]
    theirs = found[0]
    if isinstance(node, ast.ClassDef) and isinstance(theirs, ast.ClassDef):
        shown = shown_members(node, theirs)
        if shown is not None and pieces.is_dataclass(theirs):
            shown += [pieces.key(f) for f in pieces.fields(theirs)]  # a dataclass shows all its fields in one cell
        return pieces.class_piece(home, theirs, shown)
    return pieces.piece(home, theirs), [range(pieces.first_line(theirs), pieces.last_line(theirs) + 1)]


def is_partial(node: ast.ClassDef) -> bool:
    """A class cell that ends in a bare `...` shows a part of the class."""
    return pieces.is_ellipsis(node.body[-1])


def shown_members(node: ast.ClassDef, theirs: ast.ClassDef) -> list[str] | None:
    """The members that a cell shows in part; None when it shows the class whole."""
    if is_partial(node) and not pieces.is_ellipsis(theirs.body[-1]):
        return [pieces.key(s) for s in node.body[:-1]]
    return None


def same_as_package(statement: Live, definition: ast.stmt, cell: str) -> bool:
    """Is the text of a definition, or of one constant of a `with` block, what the package says?

    Blanks at line ends aside. False for what the package does not have.
    """
    try:
        if isinstance(statement.node, ast.With):
            home = Home.read(statement.home)
            theirs = home.find(pieces.key(definition))
            lines = cell.split("\n")[definition.lineno - 1 : pieces.last_line(definition)]
            return theirs is not None and _stripped(pieces.piece(home, theirs)) == _stripped(pieces.dedent(lines))
        return _stripped(wanted(statement)[0]) == _stripped(statement.text(cell))
    except LiveError:
        return False


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\n")]


def sync_cell(cell: str) -> str:
    """The cell as the package would have it. Raises LiveError for a cell that the package cannot fill."""
    lines = cell.split("\n")
    for statement in reversed(live_statements(cell)):
        lines[statement.start - 1 : pieces.last_line(statement.node)] = wanted(statement)[0].split("\n")
    return "\n".join(lines)
