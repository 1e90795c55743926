"""The package as it stands after chapter k, and what keeps its growth honest.

`python -m pagedvllm.teach truncate 4 DIR` writes DIR/src/pagedvllm and DIR/book: roadmap.toml, and
the source map with its index.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from pagedvllm.teach import pieces, roadmap, source_map


def write(number: str, to: Path, root: Path = roadmap.ROOT) -> Path:
    """Copy the files of chapters 1..number, teach/ and the data files beside them. Returns the new source folder."""
    package = root / "src" / "pagedvllm"
    for file in files(number, root):
        target = to / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    assert (to / "src" / package.name).is_dir()
    return to / "src"


def files(number: str, root: Path = roadmap.ROOT) -> list[Path]:
    """What `write` copies."""
    package = root / "src" / "pagedvllm"
    modules = [roadmap.module_file(m, package) for m in roadmap.modules_until(number, root)]
    folders = {package} | {d for m in modules for d in m.parents if package in d.parents}
    chosen = {root / "book" / "roadmap.toml", *modules, *(d / "__init__.py" for d in folders)}
    chosen |= {f for f in _source_map(root) if f.is_file()}
    chosen |= {f for f in (package / "teach").rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    chosen |= {f for d in folders for f in d.iterdir() if f.is_file() and f.suffix not in (".py", ".pyc")}
    return sorted(chosen)


def _source_map(root: Path) -> list[Path]:
    """What `teach.anchors` reads: the map, and the index of its release."""
    file = root / "book" / "source_map.toml"
    return [file, source_map.index_file(source_map.read(root).version, root)] if file.is_file() else []


def imports(file: Path, source: Path = roadmap.SOURCE) -> set[str]:
    """What of the package a module imports when it is imported: not in functions, not under `if TYPE_CHECKING:`."""
    out: set[str] = set()
    package = list(file.relative_to(source).parts[:-1])

    def walk(body: list[ast.stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, ast.Import):
                out.update(a.name for a in stmt.names)
            elif isinstance(stmt, ast.ImportFrom):
                base = package[: len(package) - stmt.level + 1] if stmt.level else []
                module = ".".join([*base, *([stmt.module] if stmt.module else [])])
                out.update([module, *(f"{module}.{a.name}" for a in stmt.names)])
            elif pieces.type_checking(stmt):
                assert isinstance(stmt, ast.If)
                walk(stmt.orelse)
            elif not isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name in ("body", "orelse", "finalbody"):
                    walk(getattr(stmt, name, []))
                for handler in getattr(stmt, "handlers", []):
                    walk(handler.body)

    walk(ast.parse(file.read_text("utf-8")).body)
    return {m for m in out if m == source.name or m.startswith("pagedvllm")}


def violations(root: Path = roadmap.ROOT) -> list[str]:
    """Modules in no chapter, chapters without their module, and imports from a later chapter or of teach."""
    source = root / "src"
    package = source / "pagedvllm"
    chapters = roadmap.read(root)
    every = [m for c in chapters for m in c.modules]
    bad = [f"{m}: in two chapters" for m in sorted(set(every)) if every.count(m) > 1]
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[0] != "teach" and parts[-1] != "__init__" and ".".join(parts) not in every:
            bad.append(f"{'.'.join(parts)}: in no chapter")
    seen: set[str] = set()
    for chapter in chapters:
        seen |= set(chapter.modules)
        for module in chapter.modules:
            file = roadmap.module_file(module, package)
            if not file.is_file():
                bad.append(f"chapter {chapter.id}: {module} does not exist")
                continue
            names = sorted(i.removeprefix("pagedvllm.") for i in imports(file, source))
            late = [name for name in names if name in set(every) - seen]
            bad += [f"chapter {chapter.id}: {module} imports {name}, of a later chapter" for name in late]
            if any(name.split(".")[0] == "teach" for name in names):
                bad.append(f"chapter {chapter.id}: {module} imports teach, which the engine never does")
    return bad
