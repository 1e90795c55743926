"""llms.txt (every page with its address and first words) and llms-full.txt (the text of all pages) for language models.

Written from the sources in the order of the table of contents; the addresses are relative to the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

LINE = 160  # characters of a page's summary


def pages_in_order(env: BuildEnvironment) -> Iterator[str]:
    """The names of all pages as a reader meets them, each once."""
    seen: set[str] = set()

    def walk(name: str) -> Iterator[str]:
        if name in seen:
            return
        seen.add(name)
        yield name
        for child in env.toctree_includes.get(name, []):
            yield from walk(child)

    yield from walk(env.config.root_doc)


def summary(doctree: nodes.document) -> str:
    """The page's first paragraph that stands in running text, cut at a word."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, (nodes.section, nodes.document)):
            text = " ".join(paragraph.astext().split())
            return text if len(text) <= LINE else text[:LINE].rsplit(" ", 1)[0] + " ..."
    return ""


def plain_text(source: Path) -> str:
    """A page's source as Markdown; of a notebook, its text, its code and its printed outputs."""
    if source.suffix != ".ipynb":
        return source.read_text("utf-8")
    parts: list[str] = []
    for cell in json.loads(source.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [f"```text\n{shown}\n```" for output in cell.get("outputs", []) if (shown := printed(output))]
    return "\n\n".join(parts)


def printed(output: dict[str, Any]) -> str:
    """The text of one stored output; of a figure that has no other text, nothing."""
    if "text" in output:
        return "".join(output["text"]).rstrip()
    data = output.get("data", {})
    return "" if any(kind.startswith("image/") for kind in data) else "".join(data.get("text/plain", "")).rstrip()


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    env, out = app.env, Path(app.outdir)
    index, full = [f"# {app.config.project}", ""], []
    for name in pages_in_order(env):
        title = env.titles[name].astext()
        index.append(f"- [{title}]({name}.html): {summary(env.get_doctree(name))}".rstrip(": "))
        source = Path(env.doc2path(name))
        # The generated source pages would double the book: their addresses are enough.
        if not name.startswith("book/source/"):
            full.append(f"<!-- {name} -->\n\n{plain_text(source).strip()}\n")
    (out / "llms.txt").write_text("\n".join(index) + "\n", "utf-8")
    if not (app.config.language or "").startswith("zh"):  # the sources are English
        (out / "llms-full.txt").write_text("\n\n".join(full), "utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", write)
