"""What every page says about itself: reading time, the package's version, and whether it waits for its translation."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from bookext.chapters import standing
from bookext.search import CJK

ROOT = Path(__file__).resolve().parents[3]
LATIN_WORDS, CJK_CHARACTERS, CODE_LINES = 200, 350, 20  # read in a minute
SAY = {
    "en": {"read": "Reading time {} min", "code": "code of pagedvllm {}"},
    "zh": {
        "read": "阅读约 {} 分钟",
        "code": "代码版本 pagedvllm {}",
        "english": "这一章还没有中文版，下面是英文原文。",
        "source": "源码页由程序包直接生成，保留英文。",
    },
}


def package_version() -> str:
    """`__version__` of src/pagedvllm, read as text: the site is built without the package installed."""
    text = (ROOT / "src/pagedvllm/__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("src/pagedvllm/__init__.py has no line `__version__ = ...`")
    return found[1]


def reading_minutes(doctree: nodes.document) -> int:
    """Minutes to read the page, at least 1: prose by words (Chinese by characters), code by lines."""
    code = [block.astext() for block in doctree.findall(nodes.literal_block)]
    lines: int = sum(line.strip() != "" for block in code for line in block.splitlines())
    prose = " ".join(
        t.astext() for t in doctree.findall(nodes.Text) if not isinstance(t.parent, (nodes.literal_block, nodes.raw))
    )
    characters: int = len(re.findall(f"[{CJK}]", prose))
    latin = len(re.findall(r"[A-Za-z0-9]+", prose))
    minutes: float = latin / LATIN_WORDS + characters / CJK_CHARACTERS + lines / CODE_LINES
    return max(1, round(minutes))


def waiting_for_translation(pagename: str) -> str | None:
    """Why a page of the Chinese edition shows English: "english", "source", or None where it does not."""
    if pagename.startswith("book/source/"):
        return "source"
    for chapter in standing().values():
        pages = {chapter["notebook"].removesuffix(".ipynb"), chapter.get("lab", "").removesuffix(".ipynb")}
        if pagename in pages and chapter["zh"] != "done":
            return "english"
    return None


def add_facts(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Put the line of facts under the page's title."""
    if doctree is None or "body" not in context:
        return
    chinese = (app.config.language or "").startswith("zh")
    say = SAY["zh" if chinese else "en"]
    facts = [say["read"].format(reading_minutes(doctree))]
    if context.get("page_source_suffix") == ".ipynb":
        facts.append(say["code"].format(package_version()))
    line = f'<p class="page-facts">{escape(" · ".join(facts))}</p>'
    if chinese and (reason := waiting_for_translation(pagename)):
        line += f'<div class="admonition note untranslated"><p>{escape(say[reason])}</p></div>'
    context["body"] = context["body"].replace("</h1>", "</h1>\n" + line, 1)


def lex_notebooks_as_ipython(app: Sphinx, doctree: nodes.document) -> None:
    """A notebook's cells may hold `!command` and `%magic`, which the lexer for plain Python does not know."""
    if app.env.doc2path(app.env.docname).endswith(".ipynb"):
        for block in doctree.findall(nodes.literal_block):
            if block.get("language") == "python":
                block["language"] = "ipython3"


def drop_thebe(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """No kernels run inside these pages: leave out the scripts of sphinx-thebe."""
    context["script_files"] = [
        script
        for script in context["script_files"]
        if "thebe" not in str(getattr(script, "filename", script) or "")
        and "THEBE" not in str(getattr(script, "attributes", {}).get("body", ""))
    ]


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", lex_notebooks_as_ipython)
    app.connect("html-page-context", add_facts)
    app.connect("html-page-context", drop_thebe, priority=900)
