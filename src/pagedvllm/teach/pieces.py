"""The pieces of the package that cells show: found and cut out as text. Nothing of the package is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

from pagedvllm.teach.errors import LiveError

Def = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOCSTRING = '"""'  # the key of a docstring among the members of a class


@dataclass(frozen=True)
class Home:
    """Where a definition lives: `module`, or `module:Class` (`module:Outer.Inner`)."""

    module: str
    cls: str
    text: str  # the module's source, as it is on disk now

    @classmethod
    def read(cls, home: str) -> Home:
        """Raises LiveError: there is no such module, or it has no source."""
        module, _, name = home.partition(":")
        return cls(module, name, source_file(module).read_text("utf-8"))

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    def body(self) -> list[ast.stmt]:
        """The statements of the module, or of the class. Raises LiveError: there is no such class."""
        body = _flat(self.tree.body)
        for part in self.cls.split(".") if self.cls else ():
            found = next((s for s in body if isinstance(s, ast.ClassDef) and s.name == part), None)
            if found is None:
                raise LiveError(f"{self.module} has no class {self.cls}")
            body = _flat(found.body)
        return body

    def find(self, name: str) -> ast.stmt | None:
        """The statement of that key (see `key`)."""
        return next((s for s in self.body() if key(s) == name), None)

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def source_file(module: str) -> Path:
    """The .py file of a module. Parent packages are imported to find it; their `__init__` is a docstring."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise LiveError(f"there is no module {module!r} with Python source")
    return Path(spec.origin)


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Definitions under `if TYPE_CHECKING:` or `try: import triton` count as their module's."""
    out: list[ast.stmt] = []
    for stmt in body:
        out.append(stmt)
        if isinstance(stmt, (ast.If, ast.Try)):
            handlers = stmt.handlers if isinstance(stmt, ast.Try) else []
            last = stmt.finalbody if isinstance(stmt, ast.Try) else []
            for inner in (stmt.body, *(h.body for h in handlers), stmt.orelse, last):
                out += _flat(inner)
    return out


def decorators(stmt: ast.stmt) -> list[ast.expr]:
    return stmt.decorator_list if isinstance(stmt, Def) else []


def first_line(stmt: ast.stmt) -> int:
    """1-based, the first decorator included."""
    return min([stmt.lineno, *(d.lineno for d in decorators(stmt))])


def last_line(stmt: ast.stmt) -> int:
    return stmt.end_lineno or stmt.lineno


def accessor(stmt: ast.stmt) -> str:
    """ "setter" or "deleter" when the definition is that part of a property."""
    marks = (d.attr for d in decorators(stmt) if isinstance(d, ast.Attribute))
    return next((m for m in marks if m in ("setter", "deleter")), "")


def constant_name(stmt: ast.stmt) -> str:
    """The one name that a constant's statement binds, else ""."""
    if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
        return stmt.targets[0].id
    if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name) and stmt.value is not None:
        return stmt.target.id
    return ""


def key(stmt: ast.stmt) -> str:
    """What a statement is called among its siblings: `name`, `name.setter`, the docstring, else its code."""
    if isinstance(stmt, Def):
        return ".".join(filter(None, [stmt.name, accessor(stmt)]))
    if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
        return stmt.target.id
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str):
        return DOCSTRING
    return constant_name(stmt) or ast.unparse(stmt)


def is_ellipsis(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and stmt.value.value is ...


def is_dataclass(cls: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d).split("(")[0].split(".")[-1] for d in cls.decorator_list)


def fields(cls: ast.ClassDef) -> list[ast.AnnAssign]:
    """The annotated names of a class: the fields, when it is a dataclass."""
    return [s for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def inside_strings(text: str) -> set[int]:
    """1-based lines that begin inside a string which is not a docstring: their leading blanks are data."""
    spans: list[tuple[int, int]] = []
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            spans.append((token.start[0], token.end[0]))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # from Python 3.12 on an f-string is many tokens
            opened.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            spans.append((opened.pop(), token.end[0]))
    docs = {
        n.body[0].lineno
        for n in ast.walk(ast.parse(text))
        if isinstance(n, Def) and ast.get_docstring(n, clean=False) is not None
    }
    return {line for a, b in spans if a not in docs for line in range(a + 1, b + 1)}


def dedent(lines: list[str]) -> str:
    """The lines moved left to column 0, but for those inside a string that is not a docstring."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    if not indent:
        return "\n".join(lines)
    keep = inside_strings("if 1:\n" + "\n".join(lines) + "\n")
    moved = (s if n in keep or s[:indent].strip() else s[indent:] for n, s in enumerate(lines, 2))
    return "\n".join(moved)


def indent(text: str) -> str:
    """The opposite of `dedent`, by four columns."""
    keep = inside_strings(text + "\n")
    lines = text.split("\n")
    return "\n".join(s if n in keep or not s else "    " + s for n, s in enumerate(lines, 1))


def piece(home: Home, stmt: ast.stmt) -> str:
    """A definition or a constant as it would stand at column 0."""
    return dedent(home.lines[first_line(stmt) - 1 : last_line(stmt)])


def class_piece(home: Home, cls: ast.ClassDef, shown: list[str] | None) -> tuple[str, list[range]]:
    """The class whole (`shown` is None), or its head and the members in `shown`, then `...`; and the lines shown."""
    if shown is None:
        return piece(home, cls), [range(first_line(cls), last_line(cls) + 1)]
    lines = home.lines
    head = range(first_line(cls), _with_comments(lines, cls.body[0]))
    out, ranges, end = lines[head.start - 1 : head.stop - 1], [head], head.stop - 1
    for stmt in cls.body:
        if key(stmt) in shown:
            span = range(_with_comments(lines, stmt), last_line(stmt) + 1)
            if end + 1 < span.start and not lines[span.start - 2].strip():
                out.append("")
            out += lines[span.start - 1 : span.stop - 1]
            ranges.append(span)
            end = span.stop - 1
    return dedent([*out, "", " " * cls.body[0].col_offset + "..."]), ranges


def _with_comments(lines: list[str], stmt: ast.stmt) -> int:
    """The first line of a member, with the comment that stands above it."""
    n = first_line(stmt)
    while n > 1 and lines[n - 2].lstrip().startswith("#"):
        n -= 1
    return n


def countable(tree: ast.Module) -> set[int]:
    """Lines that carry a statement; imports, docstrings and `if TYPE_CHECKING:` do not count."""
    out: set[int] = set()

    def walk(body: list[ast.stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, (ast.Import, ast.ImportFrom)) or key(stmt) == DOCSTRING or type_checking(stmt):
                continue
            inner = [b for b in (getattr(stmt, f, None) for f in ("body", "orelse", "finalbody")) if b]
            inner += [h.body for f in ("handlers", "cases") for h in getattr(stmt, f, ())]
            if inner:
                out.update(range(first_line(stmt), inner[0][0].lineno))
            else:
                out.update(range(stmt.lineno, last_line(stmt) + 1))
            for block in inner:
                walk(block)

    walk(tree.body)
    return out


def type_checking(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.If) and "TYPE_CHECKING" in ast.unparse(stmt.test)
