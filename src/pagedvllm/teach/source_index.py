"""An index of a source tree of vLLM: what each file defines, and in which line.

It is the only place of the book where line numbers of vLLM stand. It is made from an unpacked wheel by
`python -m pagedvllm.teach source-map index --tree DIR OUT`, which reads text and imports nothing, so that anybody can
make it again. Names are qualified: `LLM.generate`. Of several definitions of one name in one place (overloads, the
setter of a property) the last counts, as it does for Python.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class SourceFile:
    """What the index knows of one file."""

    sha256: str
    lines: int
    bytes: int
    symbols: Mapping[str, int]  # qualified name -> line of its `def`, `class` or `A = B`, counted from 1
    bodies: Mapping[str, str]  # qualified name -> hash of its text without comments and docstring; {}: not known


@dataclass(frozen=True)
class Index:
    """One release. Files are named relative to the package: `v1/engine/core.py`."""

    version: str
    files: Mapping[str, SourceFile]
    digest: str = ""  # as it stands in the file; "" for an index that has none, or was made just now

    @property
    def is_sound(self) -> bool:
        """Whether nothing was changed by hand since it was made."""
        return self.digest in ("", digest(self))

    def line(self, file: str, symbol: str) -> int | None:
        """Where `symbol` stands, None where the file or the symbol is not known."""
        found = self.files.get(file)
        return found.symbols.get(symbol) if found else None

    def body(self, file: str, symbol: str) -> str | None:
        found = self.files.get(file)
        return found.bodies.get(symbol) if found else None


def read(path: Path) -> Index:
    """An index, or a source tree that is indexed now, whole.

    Raises:
        ValueError: the file is not an index, or a symbol's line lies outside of its file.
        OSError: there is no such file.
    """
    if path.is_dir():
        return of_tree(path, (f.relative_to(path).as_posix() for f in sorted(path.rglob("*.py"))))
    try:
        data = json.loads(path.read_text("utf-8"))
        files = {
            name: SourceFile(f["sha256"], f["lines"], f["bytes"], f["symbols"], f.get("bodies", {}))
            for name, f in data["files"].items()
        }
        index = Index(data["version"], files, data.get("digest", ""))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not an index of vLLM's source: {error!r}") from error
    for name, file in files.items():
        for symbol, line in file.symbols.items():
            if not isinstance(line, int) or not 1 <= line <= file.lines:
                raise ValueError(f"{path.name}: {name}: {symbol} cannot stand in line {line} of {file.lines}")
    return index


def digest(index: Index) -> str:
    """A hash of all that is in the index, so that a line changed by hand is noticed."""
    content = {name: [f.sha256, f.lines, f.bytes, f.symbols, f.bodies] for name, f in index.files.items()}
    text = json.dumps([index.version, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(index: Index) -> str:
    """The index as JSON, one line a file."""
    rows = []
    for name, file in sorted(index.files.items()):
        value = {
            "sha256": file.sha256,
            "lines": file.lines,
            "bytes": file.bytes,
            "symbols": dict(file.symbols),
            "bodies": dict(file.bodies),
        }
        rows.append(f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}")
    head = f'{{"version":{json.dumps(index.version)},"digest":"{digest(index)}","files":{{\n'
    return head + ",\n".join(rows) + "\n}}\n"


def of_tree(tree: Path, names: Iterable[str]) -> Index:
    """Index the named files of an unpacked wheel's `vllm` folder; a file that is not there is left out.

    Raises:
        ValueError: the tree does not say which version it is.
    """
    version = tree / "_version.py"
    text = version.read_text("utf-8") if version.exists() else ""
    found = re.search(r"^__version__ = (?:version = )?'([^'+]+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{tree.name}/_version.py does not say which version of vLLM this is")
    return Index(found[1], {name: of_file(tree / name) for name in names if (tree / name).is_file()})


def of_file(path: Path) -> SourceFile:
    """Index one file."""
    content = path.read_bytes()
    text = content.decode("utf-8")
    symbols: dict[str, int] = {}
    bodies: dict[str, str] = {}
    lines = text.split("\n")
    for name, node in _definitions(ast.parse(text).body):
        symbols[name] = node.lineno
        bodies[name] = hashlib.sha256("\n".join(_body(node, lines)).encode()).hexdigest()[:8]
    return SourceFile(hashlib.sha256(content).hexdigest(), text.count("\n"), len(content), symbols, bodies)


def _definitions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes with what is in them, and module names that only rename something (`A = B`)."""
    for stmt in body:
        if isinstance(stmt, _DEFINITION):
            yield owner + stmt.name, stmt
            if isinstance(stmt, ast.ClassDef):
                yield from _definitions(stmt.body, f"{owner}{stmt.name}.")
        elif not owner and isinstance(stmt, ast.Assign) and isinstance(stmt.value, (ast.Name, ast.Attribute)):
            yield from ((target.id, stmt) for target in stmt.targets if isinstance(target, ast.Name))


def _body(node: ast.stmt, lines: list[str]) -> Iterator[str]:
    """The lines that are a definition's own: of a class, without those of its methods."""
    skipped: set[int] = set()
    if isinstance(node, _DEFINITION):
        if ast.get_docstring(node, clean=False) is not None:
            skipped |= _span(node.body[0])
        if isinstance(node, ast.ClassDef):
            for stmt in node.body:
                skipped |= _span(stmt) if isinstance(stmt, _DEFINITION) else set()
    for number in sorted(_span(node) - skipped):
        line = lines[number - 1].strip()
        if line and not line.startswith("#"):
            yield line


def _span(node: ast.stmt) -> set[int]:
    decorators = node.decorator_list if isinstance(node, _DEFINITION) else []
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return set(range(first, (node.end_lineno or node.lineno) + 1))
