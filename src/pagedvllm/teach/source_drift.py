"""What became of the anchors of the source map in a newer release of vLLM."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pagedvllm.teach.source_index import Index
from pagedvllm.teach.source_map import Anchor, SourceMap

KEPT, MOVED, CHANGED, VANISHED = STATES = ("kept", "moved", "changed", "vanished")


@dataclass(frozen=True)
class Drift:
    """One anchor, then and now.

    kept: same line, same text as far as is known. moved: another line, same text. changed: another text, wherever it
    stands. vanished: no symbol of that name is in that file.
    """

    anchor: Anchor
    state: str
    old: int | None
    new: int | None
    compared: bool = True  # False: an index does not know texts, so that "kept" and "moved" speak of the line alone
    candidates: tuple[str, ...] = ()  # of a vanished one: `file · symbol`, the likeliest first

    def __str__(self) -> str:
        where = f"line {self.old}" if self.old == self.new else f"line {self.old} -> {self.new}"
        text = {
            KEPT: where,
            MOVED: where,
            CHANGED: where,
            VANISHED: f"line {self.old} -> perhaps {', '.join(self.candidates)}" if self.candidates else "",
        }[self.state]
        return f"{self.state:9} {self.anchor}  {text}".rstrip()


def drift(map_: SourceMap, old: Index, new: Index) -> list[Drift]:
    """Every anchor of the map, in its order."""
    return [_one(anchor, old, new) for anchor in map_.anchors]


def _one(anchor: Anchor, old: Index, new: Index) -> Drift:
    file, symbol = anchor.file, anchor.symbol
    before, after = old.line(file, symbol), new.line(file, symbol)
    if after is None:
        return Drift(anchor, VANISHED, before, None, candidates=tuple(_candidates(anchor, old, new)))
    texts = old.body(file, symbol), new.body(file, symbol)
    same_file = file in old.files and old.files[file].sha256 == new.files[file].sha256
    compared = same_file or None not in texts
    if compared and not same_file and texts[0] != texts[1]:
        return Drift(anchor, CHANGED, before, after)
    return Drift(anchor, KEPT if before == after else MOVED, before, after, compared)


def _candidates(anchor: Anchor, old: Index, new: Index, most: int = 3) -> list[str]:
    """Where a vanished symbol may have gone: the same name in another file, the same text under another name, the same
    method in another class, or a similar name that is new in its file."""
    body = old.body(anchor.file, anchor.symbol)
    last = anchor.symbol.rpartition(".")[2]
    here = new.files.get(anchor.file)
    known = set(old.files[anchor.file].symbols) if anchor.file in old.files else set()
    fresh = [s for s in here.symbols if s not in known] if here else []
    found = [f"{f} · {anchor.symbol}" for f, file in new.files.items() if anchor.symbol in file.symbols]
    found += [
        f"{f} · {s}" for f, file in new.files.items() for s, b in file.bodies.items() if body is not None and b == body
    ]
    found += [f"{anchor.file} · {s}" for s in fresh if s.rpartition(".")[2] == last]
    found += [f"{anchor.file} · {s}" for s in difflib.get_close_matches(anchor.symbol, fresh, n=most, cutoff=0.75)]
    return list(dict.fromkeys(found))[:most]


def counts(drifts: list[Drift]) -> Counter[str]:
    return Counter(d.state for d in drifts)


def report(map_: SourceMap, old: Index, new: Index, everything: bool = False) -> Iterator[str]:
    """The report, chapter by chapter: a line of counts, then each anchor that is not where it was.

    Anchors that kept line and text are named only with `everything`.
    """
    drifts = drift(map_, old, new)
    yield f"vLLM {old.version} -> {new.version}, {len(drifts)} anchors: {_sum(drifts)}"
    if not all(d.compared for d in drifts):
        yield "An index does not know the texts of its symbols: what says kept or moved may have changed inside."
    for chapter in map_.chapters:
        mine = [d for d in drifts if chapter in d.anchor.chapter]
        yield f"\nchapter {chapter}, {len(mine)} anchors: {_sum(mine)}"
        yield from (f"  {d}" for d in mine if everything or d.state != KEPT)


def _sum(drifts: list[Drift]) -> str:
    number = counts(drifts)
    return ", ".join(f"{number[state]} {state}" for state in STATES)
