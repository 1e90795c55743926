"""Make gettext see what MyST and sphinx-exercise leave out.

* Cells of Markdown tables: MyST sets no `source` on their paragraphs, so Sphinx skips them.
* The title of an `{exercise}`: sphinx-exercise rebuilds it after reading, from a copy made before translation.
* The text of a mermaid diagram: one message for each diagram.
* A displayed formula: Sphinx would wrap its translation in reStructuredText's `::`, which MyST takes for the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.i18n import Locale
from sphinx_exercise.nodes import exercise_subtitle
from sphinxcontrib import mermaid


class TranslatableMermaid(mermaid.mermaid, addnodes.translatable):
    """A diagram whose whole source text is one message."""

    def preserve_original_messages(self) -> None:
        self.setdefault("rawcode", self["code"])

    def extract_original_messages(self) -> Sequence[str]:
        return [self.get("rawcode", self["code"])]

    def apply_translated_message(self, original_message: str, translated_message: str) -> None:
        self["code"] = translated_message
        self["translated"] = True


class MermaidDirective(mermaid.Mermaid):
    def run(self, **kwargs: Any) -> list[nodes.Node]:
        result: list[nodes.Node] = super().run(**kwargs)
        for top in result:
            found = list(top.findall(mermaid.mermaid)) if isinstance(top, nodes.Element) else []
            for old in found:
                new = TranslatableMermaid(**old.attributes)
                new.source, new.line = self.state_machine.get_source_and_line(self.lineno)
                if old is top:
                    result[result.index(top)] = new
                else:
                    old.replace_self(new)
        return result


class ExerciseTitle(nodes.Element, addnodes.translatable):
    """Renders nothing: it carries an exercise's title to gettext, and the translation back to it."""

    def preserve_original_messages(self) -> None:
        """The message never changes: nothing to keep."""

    def extract_original_messages(self) -> Sequence[str]:
        return [self["message"]]

    def apply_translated_message(self, original_message: str, translated_message: str) -> None:
        for title in self.parent.findall(exercise_subtitle):
            title.children = []
            title += nodes.Text(translated_message)
        self["translated"] = True


class TranslatableFormula(nodes.math_block, addnodes.translatable):
    """A displayed formula whose TeX source is one message."""

    def preserve_original_messages(self) -> None:
        """The source is kept as the node's text until it is translated."""

    def extract_original_messages(self) -> Sequence[str]:
        return [self.astext()]

    def apply_translated_message(self, original_message: str, translated_message: str) -> None:
        self.rawsource = translated_message
        self.children = []
        self += nodes.Text(translated_message)
        self["translated"] = True


def lend_position(node: nodes.Element, start: nodes.Element) -> None:
    """Give `node` the nearest source and line above it: Sphinx takes no message from a node without them."""
    above: Any = start
    while above is not None and (not above.source or above.line is None):
        above = above.parent
    node.source = above.source if above is not None else start.document["source"]
    node.line = (above.line if above is not None else None) or 1


class MarkTranslatable(SphinxTransform):
    default_priority = Locale.default_priority - 5

    def apply(self, **kwargs: Any) -> None:
        for entry in self.document.findall(nodes.entry):
            for paragraph in entry.findall(nodes.paragraph):
                if not paragraph.source:
                    lend_position(paragraph, entry)
        for old in list(self.document.findall(nodes.math_block)):
            formula = TranslatableFormula(old.rawsource, old.astext(), **old.attributes)
            formula.source, formula.line = old.source, old.line
            old.replace_self(formula)
        for title in list(self.document.findall(exercise_subtitle)):
            exercise = title.parent.parent
            carrier = ExerciseTitle(message=title.astext())
            exercise.append(carrier)
            lend_position(carrier, exercise)


class RefreshExercises(SphinxTransform):
    """Give sphinx-exercise's registry the translated node: solutions take their titles from it."""

    default_priority = Locale.default_priority + 1

    def apply(self, **kwargs: Any) -> None:
        registry = getattr(self.env, "sphinx_exercise_registry", {})
        for title in self.document.findall(exercise_subtitle):
            exercise = title.parent.parent
            if exercise.get("label") in registry:
                registry[exercise["label"]]["node"] = exercise.deepcopy()


def share_html_visitors(app: Sphinx) -> None:
    """sphinx-exercise registers visitors for "singlehtml"; those would hide everyone else's "html" ones."""
    app.registry.translation_handlers.pop("singlehtml", None)


def setup(app: Sphinx) -> None:
    app.setup_extension("sphinxcontrib.mermaid")
    app.setup_extension("sphinx_exercise")
    app.add_node(TranslatableMermaid, html=(mermaid.html_visit_mermaid, None))
    app.add_node(ExerciseTitle, html=(lambda translator, node: None, lambda translator, node: None))
    app.add_directive("mermaid", MermaidDirective, override=True)
    app.add_transform(MarkTranslatable)
    app.add_transform(RefreshExercises)
    app.connect("builder-inited", share_html_visitors)
