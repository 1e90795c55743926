"""Roles that follow book/roadmap.toml, so that no page claims a chapter that does not stand.

{chapter}`9.2`  a link to the chapter where it stands; its plain number with a ring (○) where it is planned
{state}`9.2`    "stands", linked to the chapter, or "planned"

The title of a chapter's page is given its number here too ("9.2 · Prefix caching"): in the notebook it stands alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.i18n import Locale
from sphinx.util.docutils import SphinxRole

ROADMAP = Path(__file__).resolve().parents[2] / "roadmap.toml"
WORDS = {
    "en": {
        "chapter": "chapter {}",
        "planned_chapter": "chapter {} ○",
        "stands": "stands",
        "planned": "planned",
    },
    "zh": {"chapter": "第 {} 章", "planned_chapter": "第 {} 章 ○", "stands": "已完成", "planned": "计划中"},
}


def standing() -> dict[str, dict[str, Any]]:
    """The chapters of roadmap.toml that have a notebook, by id, for example "9.2"."""
    chapters = tomllib.loads(ROADMAP.read_text("utf-8"))["chapter"]
    return {chapter["id"]: chapter for chapter in chapters if chapter.get("notebook")}


def words(language: str | None) -> dict[str, str]:
    return WORDS["zh" if (language or "").startswith("zh") else "en"]


def link(text: str, chapter: dict[str, Any], refdoc: str, classes: list[str]) -> nodes.Node:
    """A reference to the chapter's page, resolved by Sphinx when all pages are known."""
    return addnodes.pending_xref(
        "",
        nodes.inline("", text, classes=classes),
        refdomain="std",
        reftype="doc",
        reftarget="/" + chapter["notebook"].removesuffix(".ipynb"),
        refexplicit=True,
        refwarn=True,
        refdoc=refdoc,
    )


class ChapterRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        self.env.note_dependency(str(ROADMAP))
        say, chapter = words(self.config.language), standing().get(self.text)
        if chapter is None:
            return [nodes.inline("", say["planned_chapter"].format(self.text), classes=["planned"])], []
        return [link(say["chapter"].format(self.text), chapter, self.env.docname, [])], []


class StateRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        self.env.note_dependency(str(ROADMAP))
        say, chapter = words(self.config.language), standing().get(self.text)
        if chapter is None:
            return [nodes.inline("", say["planned"], classes=["state", "planned"])], []
        return [link(say["stands"], chapter, self.env.docname, ["state", "stands"])], []


class NumberTitle(SphinxTransform):
    default_priority = Locale.default_priority + 10  # the translated title

    def apply(self, **kwargs: Any) -> None:
        if self.app.builder.name == "gettext":  # translators see the title as it is written
            return
        self.env.note_dependency(str(ROADMAP))
        for number, chapter in standing().items():
            title = next(self.document.findall(nodes.title), None)
            if chapter["notebook"].removesuffix(".ipynb") == self.env.docname and title is not None:
                title.insert(0, nodes.Text(f"{number} · "))


def setup(app: Sphinx) -> None:
    app.add_role("chapter", ChapterRole())
    app.add_role("state", StateRole())
    app.add_transform(NumberTitle)
