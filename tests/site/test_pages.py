"""The built files, without a browser."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from site_support import ROOT, site_pages

EDITIONS = ["", "zh/"]


class Links(HTMLParser):
    """What a page refers to (href and src), what it loads, and the ids it offers."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        target = values.get("href") or values.get("src")
        if target is None:
            return
        self.targets.append(target)
        if tag in ("script", "img", "iframe") or (
            tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload")
        ):
            self.loaded.append(target)


def read(file: Path) -> Links:
    links = Links()
    links.feed(file.read_text("utf-8"))
    return links


def broken(file: Path, known: dict[Path, Links]) -> list[str]:
    """The references of one page that lead nowhere on this site."""
    bad = []
    for target in known[file].targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc or target.startswith("javascript:"):
            continue
        goal = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if goal.is_dir():
            goal = goal / "index.html"
        if not goal.exists():
            bad.append(f"{file.name}: {target}")
        elif parts.fragment and goal in known and unquote(parts.fragment) not in known[goal].ids:
            bad.append(f"{file.name}: no id {target}")
    return bad


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {file.resolve(): read(file) for file in sorted(site.rglob("*.html")) if "_static" not in file.parts}


def test_internal_links(pages: dict[Path, Links]) -> None:
    assert len(pages) > 20
    assert [problem for file in pages for problem in broken(file, pages)] == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<a href="b.html">x</a> <a href="#there">y</a> <a href="#gone">z</a> <p id="there">')
    assert broken(page, {page: read(page)}) == ["a.html: b.html", "a.html: no id #gone"]


def test_every_link_has_words(site: Path) -> None:
    """Or a picture, or a name for those who cannot see it."""
    wordless = re.compile(r"<a\b(?![^>]*(?:aria-label|title|id)=)[^>]*\bhref=[^>]*>(?:\s|<span[^>]*>|</span>)*</a>")
    assert wordless.search('<a class="x" href="y.html"><span class="std"></span></a>')
    found = {page.name: wordless.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert {name: links for name, links in found.items() if links} == {}


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links]) -> None:
    outside = [t for links in pages.values() for t in links.loaded if urlsplit(t).netloc]
    assert outside == []


def toc_names() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    entries = [entry for part in toc["parts"] for entry in part["chapters"]]
    return [toc["root"], *(entry["file"] for entry in entries)]


@pytest.mark.parametrize("edition", EDITIONS)
def test_every_page_is_in_llms_txt(site: Path, edition: str) -> None:
    listed = site_pages(edition)
    assert set(toc_names()) <= set(listed)
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not (site / edition / f"{name}.html").exists()] == []
    source = {f"book/source/{file.stem}" for file in (ROOT / "book/source").glob("*.md")}
    assert source <= set(listed)


def test_llms_full_holds_the_text(site: Path) -> None:
    text = (site / "llms-full.txt").read_text("utf-8")
    for name in toc_names():
        assert f"<!-- {name} -->" in text or name.startswith("book/source")
    assert "continuous batching" in text


def test_the_roadmap_is_in_the_toc() -> None:
    chapters = tomllib.loads((ROOT / "book/roadmap.toml").read_text("utf-8"))["chapter"]
    wanted = [
        chapter[kind].removesuffix(".ipynb") for chapter in chapters for kind in ("notebook", "lab") if kind in chapter
    ]
    assert set(wanted) <= set(toc_names())


def test_chapters_named_on_pages_are_in_the_roadmap_page() -> None:
    known = set(re.findall(r"\{state\}`([^`]+)`", (ROOT / "book/roadmap.md").read_text("utf-8")))
    for page in sorted((ROOT / "book").glob("*.md")):
        named = set(re.findall(r"\{(?:chapter|state)\}`([^`]+)`", page.read_text("utf-8")))
        assert named <= known, page.name


def test_both_editions_have_the_same_pages(site: Path) -> None:
    assert site_pages("") == site_pages("zh/")


def test_no_path_of_this_machine(site: Path) -> None:
    places = {str(ROOT), str(Path.home()), "site-packages"} - {"/"}
    pattern = re.compile("|".join(re.escape(place) + r"(?=[/\\\s\"'<])" for place in sorted(places)))
    bad = []
    for file in site.rglob("*"):
        if file.suffix in (".html", ".txt", ".js", ".json", ".ipynb", ".md") and "vendor" not in file.parts:
            found = pattern.search(file.read_text("utf-8"))
            bad += [f"{file.relative_to(site)}: {found[0]}"] if found else []
    assert bad == []


@pytest.mark.parametrize("edition", EDITIONS)
def test_every_page_says_how_long_it_takes(site: Path, edition: str) -> None:
    words = "阅读约" if edition else "Reading time"
    for name in site_pages(edition):
        text = (site / edition / f"{name}.html").read_text("utf-8")
        assert re.search(rf'<p class="page-facts">{words} \d+ ', text), name


@pytest.mark.parametrize("edition", EDITIONS)
def test_notebook_pages_name_the_version(site: Path, edition: str) -> None:
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "src/pagedvllm/__init__.py").read_text("utf-8"))
    assert version is not None
    for name in ("book/ch01_smallest_example", "labs/lab01_smallest_example"):
        assert f"pagedvllm {version[1]}</p>" in (site / edition / f"{name}.html").read_text("utf-8")


def test_chinese_pages_are_chinese(site: Path) -> None:
    chapters = tomllib.loads((ROOT / "book/roadmap.toml").read_text("utf-8"))["chapter"]
    english = {
        c[k].removesuffix(".ipynb") for c in chapters if c["zh"] != "done" for k in ("notebook", "lab") if k in c
    }
    for name in site_pages("zh/"):
        text = (site / "zh" / f"{name}.html").read_text("utf-8")
        title = re.search(r'<h1>((?:(?!</h1>).)*?)<a class="headerlink"', text, re.DOTALL)
        assert title is not None, name
        waits = name in english or name.startswith("book/source/")
        assert ("untranslated" in text) == waits, name
        assert waits or re.search(r"[\u3400-\u9fff]", title[1]), name


def test_formulas_are_translated(site: Path) -> None:
    texts = [(site / e / "book/ch01_smallest_example.html").read_text("utf-8") for e in EDITIONS]
    english, chinese = (re.findall(r'<div class="math[^>]*>(.*?)</div>', text, re.DOTALL) for text in texts)
    assert [r"\times" in formula for formula in english] == [r"\times" in formula for formula in chinese]
    assert "bytes per token" in "".join(english) and "字节数" in "".join(chinese)


def test_part_captions_are_chinese(site: Path) -> None:
    text = (site / "zh/book/index.html").read_text("utf-8")
    captions = re.findall(r'<p[^>]*class="caption"[^>]*><span class="caption-text">(.*?)</span>', text)
    assert len(captions) >= 4
    assert [caption for caption in captions if not re.search(r"[\u3400-\u9fff]", caption)] == []


def test_the_evidence_page_tells_the_truth(site: Path) -> None:
    from bookext.evidence import read_records

    measured: list[dict[str, Any]] = [record for record in read_records() if record["device"] == "cuda"]
    english, chinese = [(site / e / "book/evidence.html").read_text("utf-8") for e in EDITIONS]
    assert ("Not yet measured on a GPU" in english) == (not measured)
    assert ("尚未在 GPU 上测量" in chinese) == (not measured)
