"""book/roadmap.toml: the one table of chapters."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]  # of the repository, or of a truncated copy: both have src/ and book/
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "pagedvllm"


@dataclass(frozen=True)
class Chapter:
    """One chapter: what it introduces, shows, needs and costs. Paths are relative to the repository."""

    id: str
    title: str
    title_zh: str = ""
    part: int = 0
    notebook: str = ""  # "" while it is planned only
    lab: str = ""
    minutes: int = 0  # to read it
    zh: str = ""  # "done" when its Chinese is complete
    modules: tuple[str, ...] = ()  # without `pagedvllm.`; they exist from this chapter on
    core: tuple[str, ...] = ()  # `module:name` or `module:Class.method` that live cells must show
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def notebooks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.notebook, self.lab)))


def read(root: Path = ROOT) -> list[Chapter]:
    """The chapters in reading order. Raises TypeError for an unknown key, ValueError for an id given twice."""
    return list(_read(root / "book" / "roadmap.toml"))


@functools.cache
def _read(file: Path) -> tuple[Chapter, ...]:
    known = {f.name for f in fields(Chapter)}
    chapters: list[Chapter] = []
    for entry in tomllib.loads(file.read_text("utf-8"))["chapter"]:
        if unknown := sorted(set(entry) - known):
            raise TypeError(f"roadmap.toml, chapter {entry.get('id')}: unknown key {unknown[0]!r}")
        if entry["id"] in [c.id for c in chapters]:
            raise ValueError(f"roadmap.toml: chapter {entry['id']} stands twice")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        chapters.append(Chapter(**values))
    return tuple(chapters)


def chapter(number: str) -> dict[str, Any]:
    """The settings of a chapter's engine: `LLM(model, **chapter("1"))` is the same on every device.

    Raises:
        ValueError: there is no such chapter.
    """
    return dict(find(number).settings)


def find(number: str, root: Path = ROOT) -> Chapter:
    """The chapter with that id. Raises ValueError when there is none."""
    chapters = read(root)
    for entry in chapters:
        if entry.id == str(number):
            return entry
    raise ValueError(f"chapter {number!r} is not in roadmap.toml, which has {', '.join(c.id for c in chapters)}")


def notebooks(root: Path = ROOT) -> dict[str, Chapter]:
    """Path (relative to the repository) of each notebook, a chapter's or a lab's -> its chapter."""
    return {path: entry for entry in read(root) for path in entry.notebooks}


def modules_until(number: str, root: Path = ROOT) -> list[str]:
    """The modules of that chapter and of all before it."""
    chapters = read(root)
    until = chapters.index(find(number, root)) + 1
    return [m for entry in chapters[:until] for m in entry.modules]


def module_file(module: str, package: Path = PACKAGE) -> Path:
    """`model.linear` -> .../model/linear.py"""
    return package.joinpath(*module.split(".")).with_suffix(".py")
