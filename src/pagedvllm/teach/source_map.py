"""The verified map from this book to vLLM's source: book/source_map.toml, checked against book/anchors.

An anchor is a place: file, qualified symbol, and what happens there. The lines come from the index (`source_index`), so
that no page holds one by itself. `python -m pagedvllm.teach source-map`:

    verify [--tree DIR]        every anchor exists, exactly once, where the map says; with an unpacked wheel, that the
                               index is still what the wheel holds. Status 1 and one line for each problem.
    drift [--against PATH]     what became of each anchor in a newer release, chapter by chapter
    page [OUT]                 the page of the map, in Markdown
    index --tree DIR OUT       make an index from an unpacked wheel
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pagedvllm.teach import roadmap, source_index
from pagedvllm.teach.source_index import Index

TAG = "https://github.com/vllm-project/vllm/blob/v{version}/vllm/{file}"
_CHINESE = re.compile(r"[\u3400-\u9fff]")


@dataclass(frozen=True)
class Anchor:
    """One place in vLLM."""

    file: str  # relative to the package: v1/engine/core.py
    symbol: str  # qualified: EngineCore.step
    chapter: tuple[str, ...]  # the chapters that point there
    layer: str
    does: str
    does_zh: str
    ours: str = ""  # what does the same here: engine.core:EngineCore.step

    def __str__(self) -> str:
        return f"{self.file} · {self.symbol}"


@dataclass(frozen=True)
class Layer:
    """A layer of the engine: what it is responsible for, and what it does not know."""

    id: str
    name: str
    name_zh: str
    does: str
    does_zh: str
    blind: str
    blind_zh: str


@dataclass(frozen=True)
class Border:
    """What one layer hands to another: `carries` is the symbol of an anchor."""

    gives: str
    takes: str
    carries: str
    holds: str
    holds_zh: str


@dataclass(frozen=True)
class SourceMap:
    """The whole of source_map.toml."""

    version: str  # of vLLM
    newer: str  # the release that `drift` compares with
    layers: tuple[Layer, ...]
    borders: tuple[Border, ...]
    anchors: tuple[Anchor, ...]

    @property
    def files(self) -> list[str]:
        return sorted({a.file for a in self.anchors})

    @property
    def chapters(self) -> list[str]:
        """The chapters that point into vLLM, in order: 9.2 before 10."""
        return sorted({c for a in self.anchors for c in a.chapter}, key=lambda c: [int(n) for n in c.split(".")])

    def of_chapter(self, chapter: str) -> list[Anchor]:
        return [a for a in self.anchors if chapter in a.chapter]

    def of_symbol(self, symbol: str) -> Anchor | None:
        return next((a for a in self.anchors if a.symbol == symbol), None)


# ---------------------------------------------------------------- reading


def read(root: Path = roadmap.ROOT) -> SourceMap:
    """The map.

    Raises:
        TypeError: an entry lacks a key, has an unknown one, or one of another type. The message names the entry.
        ValueError: a chapter is not a number such as 9.2.
        OSError: there is no book/source_map.toml.
    """
    return _read(root / "book" / "source_map.toml")


def index_file(version: str, root: Path = roadmap.ROOT) -> Path:
    """The committed index of a release."""
    return root / "book" / "anchors" / f"vllm-{version}.json"


@functools.cache
def _read(file: Path) -> SourceMap:
    data = tomllib.loads(file.read_text("utf-8"))
    known = {"version", "newer", "layer", "border", "anchor"}
    if wrong := sorted(set(data) ^ known):
        raise TypeError(f"source_map.toml: key {wrong[0]!r} is {'missing' if wrong[0] in known else 'unknown'}")
    anchors = [_chapters(entry) for entry in data["anchor"]]
    return SourceMap(
        data["version"],
        data["newer"],
        tuple(_entry(Layer, entry) for entry in data["layer"]),
        tuple(_entry(Border, entry) for entry in data["border"]),
        tuple(_entry(Anchor, entry) for entry in anchors),
    )


def _chapters(entry: dict[str, Any]) -> dict[str, Any]:
    """`chapter = "5"` and `chapter = ["5", "6"]` are both right."""
    value = entry.get("chapter", ())
    chapters = (value,) if isinstance(value, str) else tuple(value)
    if not chapters or not all(isinstance(c, str) and re.fullmatch(r"\d+(\.\d+)?", c) for c in chapters):
        raise ValueError(f'source_map.toml, {_name(entry)}: chapter must be like "5" or ["5", "9.2"], got {value!r}')
    return {**entry, "chapter": chapters}


Entry = TypeVar("Entry", Anchor, Layer, Border)


def _entry(kind: type[Entry], entry: Mapping[str, Any]) -> Entry:
    known = {f.name: f for f in fields(kind)}
    needed = {name for name, f in known.items() if f.default is MISSING}
    if wrong := sorted((set(entry) - set(known)) | (needed - set(entry))):
        state = "missing" if wrong[0] in known else "unknown"
        raise TypeError(f"source_map.toml, {_name(entry)}: key {wrong[0]!r} is {state}")
    for name, value in entry.items():
        if name != "chapter" and not isinstance(value, str):
            raise TypeError(f"source_map.toml, {_name(entry)}: {name} must be a string, got {value!r}")
    return kind(**entry)


def _name(entry: Mapping[str, Any]) -> str:
    """What an entry is called in an error."""
    parts = [str(entry[key]) for key in ("file", "symbol", "id", "carries") if key in entry]
    return " · ".join(parts) or f"entry {dict(entry)!r:.60}"


# ---------------------------------------------------------------- verifying


def verify(map_: SourceMap, index: Index, root: Path = roadmap.ROOT, tree: Path | None = None) -> list[str]:
    """All that is wrong with the map, one line each, beginning with the entry; [] when all is well.

    With `tree`, an unpacked wheel's `vllm` folder, the index itself is made again from it and compared.
    """
    bad = [] if map_.anchors else ["source_map.toml: there is no anchor"]
    if index.version != map_.version:
        bad.append(f"source_map.toml is about vLLM {map_.version}, the index about {index.version}")
    if not index.is_sound:
        bad.append(f"vllm-{index.version}.json was changed by hand: make it again with `source-map index`")
    seen: set[str] = set()
    for anchor in map_.anchors:
        if str(anchor) in seen:
            bad.append(f"{anchor}: stands twice")
        seen.add(str(anchor))
        bad += [f"{anchor}: {problem}" for problem in _problems(anchor, map_, index, root)]
    bad += _unsound(map_)
    return bad + (_moved(map_, index, tree) if tree else [])


def _problems(anchor: Anchor, map_: SourceMap, index: Index, root: Path) -> Iterator[str]:
    """What is wrong with one anchor."""
    if problem := lookup(anchor.file, anchor.symbol, index):
        yield problem
    if anchor.layer not in {layer.id for layer in map_.layers}:
        yield f"layer {anchor.layer!r} is not one of the layers"
    if not anchor.does.strip():
        yield "does is empty"
    if not _CHINESE.search(anchor.does_zh):
        yield "does_zh holds no Chinese"
    if anchor.ours and not exists(anchor.ours, root):
        yield f"ours: pagedvllm has no {anchor.ours}"


def lookup(file: str, symbol: str, index: Index) -> str | None:
    """Why `symbol` is not exactly where it should be, or None.

    A symbol must be qualified: `step` alone is ambiguous where several classes have it, and wrong where one has it.
    """
    elsewhere = [name for name, f in index.files.items() if symbol in f.symbols and name != file]
    hint = f"; it is in {', '.join(elsewhere[:3])}" if symbol and elsewhere else ""
    if file not in index.files:
        namesakes = [name for name in index.files if name.rpartition("/")[2] == file.rpartition("/")[2]]
        return f"missing file{hint or (f'; there is {namesakes[0]}' if namesakes else '')}"
    symbols = index.files[file].symbols
    if symbol in symbols:
        return None
    similar = [name for name in symbols if symbol and name.endswith("." + symbol.rpartition(".")[2])]
    if "." not in symbol and len(similar) > 1:
        return f"ambiguous symbol: it may be {', '.join(similar[:4])}"
    if hint:
        return f"moved symbol{hint}"
    return "missing symbol" + (f"; there is {', '.join(similar[:3])}" if similar else "")


def exists(name: str, root: Path = roadmap.ROOT) -> bool:
    """Whether the package defines `module:name` or `module:Class.name`, a method, a field or a constant; by text."""
    module, _, path = name.partition(":")
    file = roadmap.module_file(module, root / "src" / "pagedvllm")
    if not path or not file.is_file():
        return False
    body = ast.parse(file.read_text("utf-8")).body
    for part in path.split("."):
        found = next((stmt for stmt in body if part in _bound(stmt)), None)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def _bound(stmt: ast.stmt) -> list[str]:
    if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [stmt.name]
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target] if isinstance(stmt, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _unsound(map_: SourceMap) -> Iterator[str]:
    """Layers without a place, borders between unknown layers or with an unknown load, and English left in Chinese."""
    known = {layer.id for layer in map_.layers}
    for layer in map_.layers:
        if not any(a.layer == layer.id for a in map_.anchors):
            yield f"layer {layer.id}: no anchor is in it"
        if not (_CHINESE.search(layer.does_zh) and _CHINESE.search(layer.blind_zh)):
            yield f"layer {layer.id}: does_zh or blind_zh holds no Chinese"
    for border in map_.borders:
        if missing := {border.gives, border.takes} - known:
            yield f"border {border.carries}: {missing.pop()!r} is not one of the layers"
        if map_.of_symbol(border.carries) is None:
            yield f"border {border.carries}: no anchor has that symbol"
        if not _CHINESE.search(border.holds_zh):
            yield f"border {border.carries}: holds_zh holds no Chinese"


def _moved(map_: SourceMap, index: Index, tree: Path) -> list[str]:
    """How a source tree differs from the index, first in the files, then at each anchor."""
    fresh = source_index.of_tree(tree, index.files)
    if fresh.version != index.version:
        return [f"{tree.name} is vLLM {fresh.version}, the index is of {index.version}"]
    bad = []
    for name, file in index.files.items():
        now = fresh.files.get(name)
        if now is None:
            bad.append(f"{name}: missing file in the tree")
        elif (now.sha256, now.bytes) != (file.sha256, file.bytes):
            bad.append(f"{name}: changed file, {file.bytes} bytes in the index and {now.bytes} in the tree")
        elif now != file:
            bad.append(f"{name}: the index is not what `source-map index` makes of this file")
    for anchor in map_.anchors:
        old, new = (i.line(anchor.file, anchor.symbol) for i in (index, fresh))
        if old is not None and old != new:
            bad.append(f"{anchor}: moved from line {old} to {new}" if new else f"{anchor}: missing symbol in the tree")
    return bad
