"""The annotated source: one MyST page for each module, each definition with its code and where the book explains it.

Everything is read from text: no module is imported, and the same tree gives the same bytes. The pages are made for
book/source, wherever they are written first.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pagedvllm.teach import cells, notebooks, pieces, roadmap, truncate
from pagedvllm.teach.errors import LiveError
from pagedvllm.teach.roadmap import Chapter

PLACE = "book/source"  # where the pages stand when the site is built
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$&@]|\.(?=\w))")  # the dot: "outputs.py" would become a link
_PLAIN_HEADING = re.compile(r"[^\[\]{}<>$\\*_|]+")  # one whose anchor is certain


@dataclass(frozen=True)
class Section:
    """A section of a chapter that shows a definition."""

    chapter: Chapter
    heading: str  # "" for the page itself
    anchor: str

    @property
    def link(self) -> str:
        page = os.path.relpath(self.chapter.notebook, PLACE)
        title = f"chapter {self.chapter.id}" + (f", {self.heading}" if self.heading else "")
        return f"[{escape(title)}]({page}{'#' + self.anchor if self.anchor else ''})"


Shown = dict[tuple[str, str], list[Section]]  # (module, `name` or `Class.name`) -> the sections that show it


def write_pages(directory: Path, root: Path = roadmap.ROOT) -> None:
    """Write index.md and one page for each module of roadmap.toml; take away pages of modules that are gone."""
    directory.mkdir(parents=True, exist_ok=True)
    chapters = [c for c in roadmap.read(root) if c.modules]
    shown = shown_definitions(chapters, root)
    modules = {m: c for c in chapters for m in c.modules}
    used = {m: _imported(m, modules, root) for m in modules}
    pages = {"index.md": index(chapters, root)}
    for module, chapter in modules.items():
        users = [other for other, names in used.items() if module in names]
        pages[page_name(module)] = page(module, chapter, shown, used[module], users, root)
    for old in directory.glob("pagedvllm*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (directory / name).write_text(text, "utf-8")


def page_name(module: str) -> str:
    return f"pagedvllm-{module.replace('.', '-')}.md"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, but for `code`."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts))


def fence(code: str) -> str:
    """A block of Python, fenced by more backticks than it holds."""
    longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
    ticks = "`" * (longest + 1)
    return f"{ticks}python\n{code}\n{ticks}"


def _imported(module: str, modules: dict[str, Chapter], root: Path) -> list[str]:
    names = truncate.imports(roadmap.module_file(module, root / "src" / "pagedvllm"), root / "src")
    found = {n.removeprefix("pagedvllm.") for n in names}
    return [m for m in modules if m in found and m != module]


# ---------------------------------------------------------------- what the chapters show


def shown_definitions(chapters: list[Chapter], root: Path = roadmap.ROOT) -> Shown:
    """Which section of which chapter shows each definition in a live cell."""
    shown: Shown = {}
    for chapter in chapters:
        path = root / chapter.notebook
        if not chapter.notebook or not path.is_file():
            continue
        heading, anchor, seen = "", "", set[str]()
        for cell in notebooks.read(path).cells:
            if cell.cell_type == "markdown":
                for line in re.sub(r"```.*?```", "", cell.source, flags=re.S).split("\n"):
                    if match := re.match(r"(#{2,3}) +(.+?) *#*$", line):
                        heading, anchor = _heading(match[2], seen)
            elif cell.cell_type == "code" and notebooks.EDITED not in notebooks.tags(cell):
                for key in _definitions(cell.source):
                    section = Section(chapter, heading, anchor)
                    if section not in shown.setdefault(key, []):
                        shown[key].append(section)
    return shown


def _heading(text: str, seen: set[str]) -> tuple[str, str]:
    """A heading's text and its anchor, as MyST makes it (GitHub's way); "" when it is not certain."""
    plain = text.replace("`", "")
    if not _PLAIN_HEADING.fullmatch(plain):
        return "", ""
    anchor = unique = re.sub(r"[^\w\u4e00-\u9fff\- ]", "", plain.lower().replace(" ", "-"))
    number = 1
    while unique in seen:
        unique = f"{anchor}-{number}"
        number += 1
    seen.add(unique)
    return plain, unique


def _definitions(source: str) -> list[tuple[str, str]]:
    """(module, dotted name) of what a cell shows; of a class in part, the members that it shows, too."""
    found: list[tuple[str, str]] = []
    try:
        statements = cells.live_statements(source)
    except (LiveError, SyntaxError):
        return []  # `check` complains about it
    for statement in statements:
        module, _, owner = statement.home.removeprefix("pagedvllm.").partition(":")
        for stmt in statement.body:
            name = ".".join(filter(None, [owner, pieces.key(stmt).split(".")[0]]))
            found.append((module, name))
            if isinstance(stmt, ast.ClassDef):
                found += [(module, f"{name}.{s.name}") for s in stmt.body if isinstance(s, ast.FunctionDef)]
    return found


# ---------------------------------------------------------------- the pages


def index(chapters: list[Chapter], root: Path = roadmap.ROOT) -> str:
    """The list of all modules, chapter by chapter."""
    out = [
        "# The annotated source",
        "Every module of the engine, as it stands in the repository, in the order in which the chapters bring it in. "
        "Each definition names the section that shows it in a live cell, or else the chapter that it belongs to.",
    ]
    for chapter in chapters:
        title = f"Chapter {chapter.id}: {chapter.title}"
        out.append(f"## {escape(title)}")
        rows = []
        for module in chapter.modules:
            text = roadmap.module_file(module, root / "src" / "pagedvllm").read_text("utf-8")
            doc = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
            rows.append(
                f"- [pagedvllm.{escape(module)}]({page_name(module)}) ({text.count(chr(10))} lines): {escape(doc)}"
            )
        out.append("\n".join(rows))
    return "\n\n".join(out) + "\n"


def page(
    module: str, chapter: Chapter, shown: Shown, imports: list[str], users: list[str], root: Path = roadmap.ROOT
) -> str:
    """One module: its links, then its code, definition by definition."""
    text = roadmap.module_file(module, root / "src" / "pagedvllm").read_text("utf-8")
    here = Section(chapter, "", "")
    known = bool(chapter.notebook) and (root / chapter.notebook).is_file()
    facts = [f"Introduced in {here.link if known else escape(f'chapter {chapter.id}')}."]
    for label, names in (("Imports", imports), ("Imported by", users)):
        if names:
            facts.append(f"{label} {', '.join(f'[{escape(n)}]({page_name(n)})' for n in names)}.")
    out = [f"# pagedvllm.{escape(module)}", " ".join(facts)]
    for stmt, code in blocks(text):
        if isinstance(stmt, pieces.Def):
            out.append(f"## `{stmt.name}`")
            out += _explained(module, stmt, shown) or [facts[0].replace("Introduced in", "Part of")]
        out.append(fence(code))
    return "\n\n".join(out) + "\n"


def _explained(module: str, stmt: ast.stmt, shown: Shown) -> list[str]:
    """Where a definition is explained, and which of its methods stand in which section."""
    assert isinstance(stmt, pieces.Def)
    out = []
    if sections := shown.get((module, stmt.name)):
        out.append(f"Shown in {', '.join(s.link for s in sections)}.")
    members = [s for s in stmt.body if isinstance(s, ast.FunctionDef)] if isinstance(stmt, ast.ClassDef) else []
    rows = []
    for name in dict.fromkeys(m.name for m in members):
        if found := shown.get((module, f"{stmt.name}.{name}")):
            rows.append(f"- `{name}`: {', '.join(s.link for s in found)}")
    return out + (["\n".join(rows)] if rows else [])


def blocks(text: str) -> list[tuple[ast.stmt | None, str]]:
    """The module cut at its functions and classes; comments go with what follows. None: other statements."""
    lines = text.rstrip("\n").split("\n")
    out: list[tuple[ast.stmt | None, str]] = []
    start = 0
    body = ast.parse(text).body
    for i, stmt in enumerate(body):
        if isinstance(stmt, pieces.Def):
            if between := _between(lines[start : pieces.first_line(stmt) - 1]):
                out.append((None, between))
            out.append((stmt, "\n".join(lines[pieces.first_line(stmt) - 1 : pieces.last_line(stmt)])))
            start = pieces.last_line(stmt)
        elif i + 1 == len(body) or isinstance(body[i + 1], pieces.Def):
            if code := _between(lines[start : pieces.last_line(stmt)]):
                out.append((None, code))
            start = pieces.last_line(stmt)
    if rest := _between(lines[start:]):
        out.append((None, rest))
    return out


def _between(lines: list[str]) -> str:
    return "\n".join(lines).strip("\n")
