"""The book's own Sphinx extension.

* translate: what MyST and sphinx-exercise hide from gettext
* search: Chinese full-text search by pairs of characters, without a dictionary
* glossary: anchors of its terms for plain Markdown links
* chapters: the roles {chapter} and {state}, which follow roadmap.toml
* evidence: the table of measured claims, from evidence/*.json and benchmarks/*.json
* source_map: the directive {source-map}, tables of places in vLLM
* page: reading time, package version and the notice on an untranslated page
* llms: llms.txt and llms-full.txt
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from bookext import chapters, evidence, glossary, llms, page, search, source_map, translate


def setup(app: Sphinx) -> dict[str, Any]:
    for part in (translate, search, chapters, glossary, evidence, source_map, page, llms):
        part.setup(app)
    # Pages that were read by an earlier state of this code are read again.
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return {"env_version": zlib.crc32(code), "parallel_read_safe": True, "parallel_write_safe": True}
