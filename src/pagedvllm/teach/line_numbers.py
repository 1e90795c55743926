"""A lint: no line number of somebody else's source may stand in the book, because it would be wrong after the next
release. Places are named by file and symbol; `teach.anchors` and the page of the source map know the lines.

What is found: `core.py:589`, `core.py 589`, `core.py, line 589`, `line 589`, `L589`, `#L5`, `第 589 行`, `行号 589`,
and a symbol of the source map beside its own line, `EngineCore.step (589)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from pagedvllm.teach.source_index import Index
from pagedvllm.teach.source_map import SourceMap

_FILE = r"\b[\w/.-]*\w\.(?:py|pyi|cu|cuh|cpp|cc|h|hpp|rs)\b"
_FORMS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_FILE}`?\s*(?:[:#@,(（，：]\s*)*(?:L|lines?\s*|第\s*)?\d+",  # core.py:589, core.py 第 589 行
        r"\blines?\s*(?:no\.?|numbers?|#|:|=)?\s*\d+",  # line 589, lines 10-20, line number 589
        r"#L\d+",  # the end of an address
        r"第\s*\d+(?:\s*[-–—~～至到]\s*\d+)?\s*行",
        r"行号\s*[:：为是]?\s*\d+",
    )
]
# L and at least two digits. L4, L20, L40 and L40S are cards, L1 and L2 are caches.
_LETTER = re.compile(r"(?<![\w#])L(?!20\b|40\b)\d{2,5}\b")
_BESIDE = re.compile(r"\b([A-Za-z_]\w*)(?:\(\))?`?\s*[(:@,（：，]?\s*(\d{2,5})\b(?![.,]\d)")


def known_lines(map_: SourceMap, *indexes: Index) -> dict[str, set[int]]:
    """The last part of each anchor's name -> the lines in which it stands in these releases."""
    lines: dict[str, set[int]] = {}
    for anchor in map_.anchors:
        for index in indexes:
            if line := index.line(anchor.file, anchor.symbol):
                lines.setdefault(anchor.symbol.rpartition(".")[2], set()).add(line)
    return lines


def find(text: str, known: Mapping[str, Iterable[int]] | None = None) -> list[str]:
    """Each bare line number of a text, as it stands there."""
    return list(dict.fromkeys(_find(text, known or {})))


def _find(text: str, known: Mapping[str, Iterable[int]]) -> Iterator[str]:
    for form in (*_FORMS, _LETTER):
        yield from (match[0] for match in form.finditer(text))
    for match in _BESIDE.finditer(text):
        if int(match[2]) in known.get(match[1], ()):
            yield match[0]
