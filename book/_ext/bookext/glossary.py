"""Plain Markdown links to a term: [KV cache](glossary.md#kv-cache).

The role {term} shows as raw text in Colab and Jupyter, so notebooks link this way. The anchor is the English term in
lower case with hyphens, in both editions.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def register_terms(app: Sphinx, doctree: nodes.document) -> None:
    """Tell MyST the anchors of the page's terms, as it knows those of headings: (line, id, text shown)."""
    anchors = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for term in doctree.findall(nodes.term):
        for identifier in term["ids"]:
            if identifier.startswith("term-"):
                anchors.setdefault(identifier.removeprefix("term-").lower(), (term.line, identifier, term.astext()))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", register_terms)
