"""The Chinese catalogues under book/locale. Usage: catalogues.py {update,check}

update  takes the messages out of the English pages and merges them into the .po files
check   fails on a message that is missing, untranslated, fuzzy, stale or damaged, or whose prose holds no Chinese

Every page is checked, but for the generated source pages, and for the chapters (and their labs) that roadmap.toml does
not mark zh = "done": those the Chinese edition shows in English under a notice.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import polib
from build import BUILD, CATALOGUES, ROOT, jupyter_book, write_source_pages

POT = BUILD / "pot"
# What a translation must keep as it is: mathematics, roles, code, the targets of links, and HTML tags.
KEEP = re.compile(r"\$[^$]+\$|\{[\w:+-]+\}`[^`]*`|`[^`]+`|\]\([^)]*\)")
CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")


def extract() -> Path:
    """Write the .pot files of all pages that are translated; returns their folder."""
    folder = POT / "_build/gettext"
    shutil.rmtree(folder, ignore_errors=True)
    write_source_pages()
    jupyter_book(POT, "--builder", "custom", "--custom-builder", "gettext")
    shutil.rmtree(folder / "book/source", ignore_errors=True)
    for stray in ("sphinx.pot", "genindex.pot"):  # the theme's and the index's own words
        (folder / stray).unlink(missing_ok=True)
    return folder


def unfinished() -> set[str]:
    """The catalogues of chapters and labs that wait for their translation, as paths without a suffix."""
    chapters = tomllib.loads((ROOT / "book/roadmap.toml").read_text("utf-8"))["chapter"]
    waiting = [chapter for chapter in chapters if chapter["zh"] != "done"]
    return {
        chapter[kind].removesuffix(".ipynb") for chapter in waiting for kind in ("notebook", "lab") if kind in chapter
    }


def kept(text: str) -> list[str]:
    """The parts that must survive; a reference may gain a title ({term}`译文 <KV cache>`), so only targets count."""
    return sorted(re.sub(r"`[^`<]*<([^>]*)>`", r"`\1`", part) for part in KEEP.findall(text))


def has_words(text: str) -> bool:
    """Whether there is anything to translate; a table cell may hold only a number or a role."""
    return re.search(r"[^\W\d_]{2,}", KEEP.sub("", text)) is not None


def is_formula(text: str) -> bool:
    """Whether the message is a displayed formula, which may stay as it is unless there is running text in it."""
    bare = KEEP.sub("", text)
    return re.search(r"\\[A-Za-z]+", bare) is not None and not re.search(r"\\text\{[^}]*[A-Za-z]{2,} [a-z]{2,}", bare)


def is_prose(text: str) -> bool:
    """Whether a translation must hold Chinese: two words in a row outside of code, mathematics and link targets.

    A name ("SmolLM2"), a citation or an address may stay as it is.
    """
    return re.search(r"[A-Za-z]{2,} [a-z]{2,}", KEEP.sub("", text)) is not None


def complain(entry: polib.POEntry) -> str | None:
    """What is wrong with one translated message, or None."""
    if "fuzzy" in entry.flags:
        return "fuzzy"
    if not entry.msgstr.strip():
        return "untranslated"
    if "\n" not in entry.msgid and kept(entry.msgid) != kept(entry.msgstr):
        return f"markup differs: {kept(entry.msgid)} became {kept(entry.msgstr)}"
    if is_prose(entry.msgid) and not CJK.search(entry.msgstr):
        return "no Chinese in the translation"
    return None


def compare(pot_file: Path, po_file: Path) -> list[str]:
    """The complaints about one page's catalogue."""
    if not po_file.exists():
        return ["missing, run make zh"]
    catalogue = polib.pofile(str(po_file))
    have = {entry.msgid: entry for entry in catalogue if not entry.obsolete}
    bad: list[str] = []
    for msgid in [entry.msgid for entry in polib.pofile(str(pot_file))]:
        entry = have.pop(msgid, None)
        if not has_words(msgid) or (is_formula(msgid) and (entry is None or not entry.msgstr)):
            continue
        reason = "not in the catalogue, run make zh" if entry is None else complain(entry)
        if reason:
            bad.append(f"{reason}: {msgid[:70]!r}")
    bad += [f"no longer in the book, run make zh: {msgid[:70]!r}" for msgid in have]
    return bad + [f"obsolete: {entry.msgid[:70]!r}" for entry in catalogue.obsolete_entries()]


def check(pot_dir: Path, po_dir: Path, waiting: set[str]) -> list[str]:
    """All complaints, each with the catalogue it is about."""
    names = [file.relative_to(pot_dir).with_suffix("") for file in sorted(pot_dir.rglob("*.pot"))]
    bad = [
        f"{name}.po: {problem}"
        for name in names
        if str(name) not in waiting
        for problem in compare((pot_dir / name).with_suffix(".pot"), (po_dir / name).with_suffix(".po"))
    ]
    for po_file in sorted(po_dir.rglob("*.po")):
        if po_file.relative_to(po_dir).with_suffix("") not in names:
            bad.append(f"{po_file.relative_to(po_dir)}: its page is gone")
    return bad


def update() -> None:
    """Merge the messages of the English pages into the catalogues; what is gone is dropped."""
    intl = str(Path(sys.executable).with_name("sphinx-intl"))
    locale = ROOT / "book/locale"
    subprocess.run([intl, "update", "-p", str(extract()), "-d", str(locale), "-l", "zh_CN", "-w", "0"], check=True)
    for po_file in sorted(CATALOGUES.rglob("*.po")):
        catalogue = polib.pofile(str(po_file), wrapwidth=0)
        for entry in [*catalogue.obsolete_entries(), *(entry for entry in catalogue if not has_words(entry.msgid))]:
            catalogue.remove(entry)
        for entry in catalogue:
            entry.flags = [flag for flag in entry.flags if flag == "fuzzy"]
        catalogue.metadata_is_fuzzy = False
        catalogue.metadata = {"Language": "zh_CN", "Content-Type": "text/plain; charset=utf-8"}
        catalogue.header = "Simplified Chinese messages of this page. Licence: LICENSE-book."
        catalogue.save(str(po_file))
    left = check(POT / "_build/gettext", CATALOGUES, unfinished())
    print(f"{len(left)} messages to do" if left else "all messages translated")


def main() -> int:
    if sys.argv[1:] == ["update"]:
        update()
        return 0
    if sys.argv[1:] != ["check"]:
        print(__doc__)
        return 2
    bad = check(extract(), CATALOGUES, unfinished())
    print("\n".join(bad) or "all messages translated")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
