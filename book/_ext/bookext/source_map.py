"""The directive {source-map}: a part of the map from this book to vLLM's source, in the language of the edition.

The text comes from pagedvllm.teach.source_map_page, which reads book/source_map.toml and book/anchors; the package is
taken from src, since the site is built without it installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[3]
TEACH = ROOT / "src/pagedvllm/teach"


class SourceMapPart(SphinxDirective):
    """One of the parts "layers", "borders", "places" and "drift"; "places" brings a heading for each layer."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if str(ROOT / "src") not in sys.path:
            sys.path.insert(0, str(ROOT / "src"))
        from pagedvllm.teach import source_map_page

        read = [ROOT / "book/source_map.toml", ROOT / "book/roadmap.toml", *(ROOT / "book/anchors").glob("*.json")]
        for path in (*read, *TEACH.glob("source_*.py")):
            self.env.note_dependency(str(path))
        language = "zh" if (self.config.language or "").startswith("zh") else "en"
        try:
            text = source_map_page.part(self.arguments[0], language)
        except (OSError, TypeError, ValueError) as error:
            raise self.error(str(error)) from error
        first, *rest = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
        sections = [self.section(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
        made = [*self.parsed(first), *sections]
        for top in made:
            for node in top.findall(nodes.Element):
                if not isinstance(node, nodes.inline):  # Sphinx unwraps an inline that says so, links' words included
                    node["translatable"] = False  # not for gettext: both languages stand in the map
            for table in top.findall(nodes.table):
                numbers = len(list(table.findall(nodes.colspec))) > 4  # counts, which need no room
                table["classes"] += ["source-map", "numbers" if numbers else self.arguments[0]]
        return made

    def section(self, title: str, text: str) -> nodes.section:
        """A section of its own; MyST would hang it into the document, past the reach of this directive."""
        number = self.env.new_serialno("source-map")  # the same in both editions, which a title is not
        made = nodes.section("", nodes.title(title, title), *self.parsed(text), ids=[f"places-{number + 1}"])
        made.source, made.line = self.get_source_info()
        return made

    def parsed(self, text: str) -> list[nodes.Node]:
        """The nodes of a Markdown text without headings."""
        parent = nodes.Element()
        parent.document = self.state.document
        source, _ = self.get_source_info()
        self.state.nested_parse(StringList(text.split("\n"), source), self.content_offset, parent)
        return list(parent.children)


def setup(app: Sphinx) -> None:
    app.add_directive("source-map", SourceMapPart)
