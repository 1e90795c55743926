"""The source map as the reader sees it: tables in Markdown for the page, and a table in HTML for a chapter.

Both are made from book/source_map.toml and the committed index alone, and the same input gives the same text. A line
number appears only inside the address of a link.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pagedvllm.teach import roadmap, source_drift, source_index, source_map
from pagedvllm.teach.source_drift import VANISHED
from pagedvllm.teach.source_index import Index
from pagedvllm.teach.source_map import TAG, Anchor, SourceMap

FENCE = "```{source-map} "
WORDS = {
    "en": {
        "layer": "Layer",
        "does": "What it is responsible for",
        "blind": "What it does not know",
        "border": "From → to",
        "carries": "What crosses",
        "holds": "What is in it",
        "place": "In vLLM {version}",
        "there": "What happens there",
        "ours": "Here",
        "chapter": "Chapter",
        "chapters": "Ch.",
        "anchors": "Places",
        **{state: state for state in source_drift.STATES},
        "gone": "No longer there in {version}",
        "perhaps": "Look at",
        "nowhere": "nothing of a similar name",
    },
    "zh": {
        "layer": "层",
        "does": "负责什么",
        "blind": "不知道什么",
        "border": "从 → 到",
        "carries": "传递的对象",
        "holds": "里面有什么",
        "place": "vLLM {version} 中的位置",
        "there": "那里做什么",
        "ours": "本书引擎",
        "chapter": "章",
        "chapters": "章",
        "anchors": "位置数",
        "kept": "未变",
        "moved": "行号变了",
        "changed": "内容变了",
        "vanished": "不见了",
        "gone": "{version} 中已经没有",
        "perhaps": "可以看",
        "nowhere": "没有名字相近的",
    },
}


def url(anchor: Anchor, index: Index) -> str:
    """The place on GitHub, at the release's tag."""
    line = index.line(anchor.file, anchor.symbol)
    return TAG.format(version=index.version, file=anchor.file) + (f"#L{line}" if line else "")


def load(root: Path = roadmap.ROOT) -> tuple[SourceMap, Index]:
    """The map and the index of its release."""
    map_ = source_map.read(root)
    return map_, source_index.read(source_map.index_file(map_.version, root))


# ---------------------------------------------------------------- the page


def page(root: Path = roadmap.ROOT) -> str:
    """book/source_map.md with its tables filled in."""
    out: list[str] = []
    inside = False
    for line in (root / "book" / "source_map.md").read_text("utf-8").split("\n"):
        if line.startswith(FENCE):
            out.append(part(line.removeprefix(FENCE).strip(), "en", root))
            inside = True
        elif not inside:
            out.append(line)
        elif line == "```":
            inside = False
    return "\n".join(out)


def part(name: str, language: str = "en", root: Path = roadmap.ROOT) -> str:
    """One part of the page, in Markdown: "layers", "borders", "places" or "drift"; `language` is "en" or "zh".

    Raises:
        ValueError: there is no such part.
    """
    if name not in PARTS:
        raise ValueError(f"source-map: there is no part {name!r}; there are {', '.join(PARTS)}")
    map_, index = load(root)
    return "\n".join(PARTS[name](map_, index, language, root))


def _layers(map_: SourceMap, index: Index, language: str, root: Path) -> Iterator[str]:
    say = WORDS[language]
    yield from _head(say["layer"], say["does"], say["blind"])
    for layer in map_.layers:
        yield _row(f"**{_in(language, layer, 'name')}**", _in(language, layer, "does"), _in(language, layer, "blind"))


def _borders(map_: SourceMap, index: Index, language: str, root: Path) -> Iterator[str]:
    say = WORDS[language]
    names = {layer.id: _in(language, layer, "name") for layer in map_.layers}
    yield from _head(say["border"], say["carries"], say["holds"])
    for border in map_.borders:
        anchor = map_.of_symbol(border.carries)
        carries = f"[`{border.carries}`]({url(anchor, index)})" if anchor else f"`{border.carries}`"
        yield _row(f"{names[border.gives]} → {names[border.takes]}", carries, _in(language, border, "holds"))


def _places(map_: SourceMap, index: Index, language: str, root: Path) -> Iterator[str]:
    say = WORDS[language]
    chapters = {chapter.id: chapter for chapter in roadmap.read(root)}
    modules = {module for chapter in chapters.values() for module in chapter.modules}
    for layer in map_.layers:
        yield f"### {_in(language, layer, 'name')}\n"
        yield from _head(say["place"].format(version=map_.version), say["there"], say["ours"], say["chapters"])
        for anchor in (a for a in map_.anchors if a.layer == layer.id):
            place = f"[`{anchor.symbol}`]({url(anchor, index)}) `{anchor.file}`"
            numbers = ", ".join(_chapter(c, chapters, root) for c in anchor.chapter)
            yield _row(place, _in(language, anchor, "does"), _ours(anchor, modules), numbers)
        yield ""


def _ours(anchor: Anchor, modules: set[str]) -> str:
    from pagedvllm.teach.source import page_name  # with nbformat, which no chapter's kernel should wait for

    if not anchor.ours:
        return ""
    module = anchor.ours.partition(":")[0]
    return f"[`{anchor.ours}`](source/{page_name(module)})" if module in modules else f"`{anchor.ours}`"


def _chapter(number: str, chapters: dict[str, roadmap.Chapter], root: Path) -> str:
    """A chapter's number, linked where it stands."""
    notebook = chapters[number].notebook if number in chapters else ""
    return f"[{number}]({Path(notebook).name})" if notebook and (root / notebook).is_file() else number


def _drift(map_: SourceMap, index: Index, language: str, root: Path) -> Iterator[str]:
    say = WORDS[language]
    newer = source_index.read(source_map.index_file(map_.newer, root))
    drifts = source_drift.drift(map_, index, newer)
    yield from _head(say["chapter"], say["anchors"], *(say[state] for state in source_drift.STATES))
    for chapter in map_.chapters:
        mine = [d for d in drifts if chapter in d.anchor.chapter]
        number = source_drift.counts(mine)
        yield _row(chapter, str(len(mine)), *(str(number[state]) for state in source_drift.STATES))
    yield ""
    yield from _head(say["gone"].format(version=newer.version), say["perhaps"], say["chapters"])
    for gone in (d for d in drifts if d.state == VANISHED):
        found = "; ".join(f"`{name}`" for name in gone.candidates) or say["nowhere"]
        yield _row(f"`{gone.anchor}`", found, ", ".join(gone.anchor.chapter))


PARTS: dict[str, Callable[[SourceMap, Index, str, Path], Iterator[str]]] = {
    "layers": _layers,
    "borders": _borders,
    "places": _places,
    "drift": _drift,
}


def _in(language: str, entry: Any, field: str) -> str:
    from pagedvllm.teach.source import escape

    text: str = getattr(entry, f"{field}_zh" if language == "zh" else field)
    return escape(text)


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*("---" for _ in cells))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- in a chapter

STYLE = """
.pagedvllm-anchors table { width: 100%; border-collapse: collapse; font-size: 0.92em; color: inherit; margin: 0; }
.pagedvllm-anchors :is(tr, th, td) { background: transparent !important; color: inherit; }
.pagedvllm-anchors :is(th, td) { border: 0; border-top: 1px solid #8886; padding: 0.35em 0.6em; text-align: left;
  vertical-align: top; white-space: normal; }
.pagedvllm-anchors table :is(td, code) { overflow-wrap: break-word; }
.pagedvllm-anchors a { color: inherit; text-decoration: underline; }
.pagedvllm-anchors code { background: transparent; border: 0; padding: 0; color: inherit; font-size: 0.95em; }
.pagedvllm-anchors td > small { display: block; }
.pagedvllm-anchors .zh, html[lang|="zh"] .pagedvllm-anchors .en { display: none; }
html[lang|="zh"] .pagedvllm-anchors .zh { display: inline; }
@media (max-width: 600px) {
  .pagedvllm-anchors thead { display: none; }
  .pagedvllm-anchors :is(tr, td) { display: block; }
  .pagedvllm-anchors td + td { border-top: 0; padding-top: 0; }
}
"""


class Anchors:
    """A chapter's places in vLLM. Jupyter shows a table with links; where there is only text, its `repr` lists them.

    The table holds both languages: the page's own language decides which one is seen.
    """

    def __init__(self, map_: SourceMap, index: Index, anchors: list[Anchor]) -> None:
        self.map, self.index, self.anchors = map_, index, anchors

    def __repr__(self) -> str:
        rows = [f"In vLLM {self.map.version}:"]
        for anchor in self.anchors:
            here = f" (here: {anchor.ours})" if anchor.ours else ""
            rows.append(f"- {anchor.symbol} in {anchor.file}{here}: {anchor.does}")
        return "\n".join(rows)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.element(), "text/plain": repr(self)}

    def element(self) -> str:
        """The HTML: a style and a table, without a script."""
        keys = ("place", "there", "ours")
        heads = [_both(*(WORDS[w][key].format(version=self.map.version) for w in ("en", "zh"))) for key in keys]
        rows = "\n".join(self._row(anchor) for anchor in self.anchors)
        head = "".join(f"<th>{text}</th>" for text in heads)
        table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
        return f'<div class="pagedvllm-anchors"><style>{STYLE}</style>\n{table}\n</div>'

    def _row(self, anchor: Anchor) -> str:
        link = f'<a href="{html.escape(url(anchor, self.index))}"><code>{_name(anchor.symbol)}</code></a>'
        place = f"<td>{link}<small>{_name(anchor.file)}</small></td>"
        ours = f"<code>{_name(anchor.ours)}</code>" if anchor.ours else ""
        return f"<tr>{place}<td>{_both(anchor.does, anchor.does_zh)}</td><td>{ours}</td></tr>"


def _name(name: str) -> str:
    """An escaped name that may go on in a new line after a dot, a slash, a colon, or an underscore between words."""
    return re.sub(r"(?<=[./:])(?!py$)(?=.)|(?<=[^\W_]_)(?=[^\W_])", "<wbr>", html.escape(name))


def _both(english: str, chinese: str) -> str:
    pieces = (("en", english), ("zh", chinese))
    return "".join(f'<span class="{language}" lang="{language}">{_code(text)}</span>' for language, text in pieces)


def _code(text: str) -> str:
    """Escaped text in which `code` is code."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def anchors(chapter: str, *layers: str) -> Anchors:
    """The places in vLLM to which a chapter points, as a table with links: anchors("5"), anchors("5", "engine").

    Raises:
        ValueError: no place belongs to that chapter, or to those layers of it.
    """
    map_, index = load()
    found = [a for a in map_.of_chapter(str(chapter)) if not layers or a.layer in layers]
    if unknown := sorted(set(layers) - {layer.id for layer in map_.layers}):
        known = ", ".join(layer.id for layer in map_.layers)
        raise ValueError(f"layer {unknown[0]!r} is not in the source map, which has {known}")
    if not found:
        raise ValueError(
            f"the source map has no place for chapter {chapter!r}{' in ' + ', '.join(layers) if layers else ''}"
        )
    return Anchors(map_, index, found)
