"""`sync`, `check` and `coverage`: the live cells of the notebooks against the package. Text only, no torch."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from pagedvllm.teach import cells, notebooks, pieces, roadmap
from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.pieces import Def, Home

FUNCTION_LINES = 38  # so that a live cell fits the eye
KERNEL_LINES = 80
COLUMNS = 92  # more would scroll sideways on a page
Shown = dict[str, set[int]]  # module -> the lines of it that live cells show


def sync(paths: list[Path]) -> int:
    """Rewrite the live cells from the package; ids, tags and outputs stay. Returns an exit status."""
    problems: list[str] = []
    for path in paths:
        notebook = notebooks.read(path)
        for where, cell in _live_cells(path, notebook, problems):
            try:
                new = cells.sync_cell(cell.source)
            except LiveError as error:
                problems.append(f"{where}: {error}")
                continue
            if new != cell.source:
                cell.source = new
                print(f"{where}: rewritten")
        notebooks.write(path, notebook)
    return _say(problems)


def check(paths: list[Path], root: Path = roadmap.ROOT, everything: bool = True) -> int:
    """Say where a live cell is not what `sync` would write, and where the package breaks the rules of live cells.

    `everything`: the notebooks are all there are, so that each core definition must be shown by one of them.
    """
    problems: list[str] = []
    shown: Shown = {}
    for path in paths:
        notebook = notebooks.read(path)
        for where, cell in _live_cells(path, notebook, problems):
            try:
                if cells.sync_cell(cell.source) != cell.source:
                    problems.append(f"{where}: differs from the package (`make sync` rewrites it)")
                _add_shown(cell.source, shown)
                problems += [f"{where}: {p}" for p in _too_long(cell.source)]
            except LiveError as error:
                problems.append(f"{where}: {error}")
    for chapter in roadmap.read(root):
        for name in chapter.core:
            problems += [f"roadmap.toml, core {name}: {p}" for p in core_problems(name, shown, everything)]
    problems += package_problems(root / "src" / "pagedvllm")
    return _say(problems)


def _live_cells(path: Path, notebook: Any, problems: list[str]) -> list[tuple[str, Any]]:
    """(place, cell) of the cells that must equal the package; what is no proper live cell goes to `problems`."""
    found: list[tuple[str, Any]] = []
    for number, cell in enumerate(notebooks.code_cells(notebook)):
        where = f"{path.name}, cell {number} ({cell.id})"
        try:
            live = cells.live_statements(cell.source)
        except (LiveError, SyntaxError) as error:
            problems.append(f"{where}: {error}")
            continue
        if not live:
            continue
        where = f"{where[:-1]}, {_labels(live)})"
        if notebooks.EDITED not in notebooks.tags(cell):
            found.append((where, cell))
        elif all(cells.same_as_package(s, d, cell.source) for s in live for d in s.body):
            problems.append(f"{where}: tagged {notebooks.EDITED!r}, but equal to the package")
    return found


def _labels(live: list[cells.Live]) -> str:
    """The definitions of a live cell, as roadmap.toml names them."""
    names = [
        f"{statement.home.removeprefix('pagedvllm.')}{'.' if ':' in statement.home else ':'}{pieces.key(definition)}"
        for statement in live
        for definition in statement.body
    ]
    return ", ".join(names[:3] + ["..."] * (len(names) > 3))


def _add_shown(source: str, shown: Shown) -> None:
    for statement in cells.live_statements(source):
        lines = shown.setdefault(statement.home.partition(":")[0], set())
        for span in cells.wanted(statement)[1]:
            lines.update(span)


def _too_long(source: str) -> list[str]:
    length = source.count("\n") + 1
    limit = KERNEL_LINES if "@triton." in source else FUNCTION_LINES + 2  # the line of `extends`, and one more
    return [f"{length} lines, at most {limit} fit"] if length > limit else []


def core_problems(name: str, shown: Shown, everything: bool = True) -> list[str]:
    """What is wrong with one entry of roadmap.toml's core list: `module:name` or `module:Class.method`."""
    module, _, path = name.removeprefix("pagedvllm.").partition(":")
    owner, _, last = path.rpartition(".")
    full = f"pagedvllm.{module}"
    try:
        home = Home.read(f"{full}:{owner}" if owner else full)
        stmt = home.find(last)
    except LiveError as error:
        return [str(error)]
    if stmt is None:
        return ["the package has no such definition"]
    problems: list[str] = []
    first, last_line = pieces.first_line(stmt), pieces.last_line(stmt)
    if everything and first not in shown.get(full, set()):
        problems.append("no live cell shows it")
    if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
        kernel = any("triton" in ast.unparse(d) for d in stmt.decorator_list)
        limit = KERNEL_LINES if kernel else FUNCTION_LINES
        if last_line - first + 1 > limit:
            problems.append(f"{last_line - first + 1} lines, at most {limit}")
    wide = [n for n in range(first, last_line + 1) if len(home.lines[n - 1]) > COLUMNS]
    if wide:
        problems.append(f"line {wide[0]} is wider than {COLUMNS} columns")
    if isinstance(stmt, Def) and first > 1 and home.lines[first - 2].lstrip().startswith("#"):
        problems.append("a comment stands above it, where no live cell shows it")
    return problems


def package_problems(package: Path) -> list[str]:
    """What the package must be like for live cells and truncation, whatever the chapters show."""
    problems: list[str] = []
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        if place.parts[0] == "teach":
            continue
        tree = ast.parse(file.read_text("utf-8"))
        if place.name == "__init__.py" and len(place.parts) > 1 and not _docstring_only(tree):
            problems.append(f"{place}: must be a docstring and nothing else")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("slots=True" in ast.unparse(d) for d in node.decorator_list):
                calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n) == "super()")
                problems += [f"{place}:{n.lineno}: super() without arguments fails in a slots dataclass" for n in calls]
    return problems


def _docstring_only(tree: ast.Module) -> bool:
    return len(tree.body) == 1 and pieces.key(tree.body[0]) == pieces.DOCSTRING


def coverage(paths: list[Path]) -> int:
    """Print what part of each module the live cells show, and which notebook shows it."""
    shown: Shown = {}
    where: dict[str, list[str]] = {}
    problems: list[str] = []
    for path in paths:
        here: Shown = {}
        for _, cell in _live_cells(path, notebooks.read(path), problems):
            _add_shown(cell.source, here)
        for module, lines in here.items():
            shown.setdefault(module, set()).update(lines)
            where.setdefault(module, []).append(path.stem)
    for module in sorted(shown):
        lines = _countable(module)
        part = len(lines & shown[module])
        print(f"{module:40} {part:4} of {len(lines):4} lines  {part / len(lines):4.0%}  {', '.join(where[module])}")
    return _say(problems)


@functools.cache
def _countable(module: str) -> set[int]:
    return pieces.countable(Home.read(module).tree)


def _say(problems: list[str]) -> int:
    for problem in problems:
        print(problem)
    return int(bool(problems))
