"""The page of measured claims, made from evidence/*.json and benchmarks/*.json when the site is built.

A record is one JSON object with the fields of `FIELDS`. A file that lacks one, or holds another type, fails the build:
a claim without its evidence is worse than no claim.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("evidence", "benchmarks")
FIELDS: dict[str, type] = {
    "claim": str,  # one sentence, as the book makes it
    "hardware": str,  # "2 cores of ..." or "NVIDIA H200"
    "device": str,  # "cpu" or "cuda"
    "date": str,  # YYYY-MM-DD
    "commit": str,  # the commit that was measured
    "source_sha256": str,  # of src/pagedvllm, as benchmarks/record.py computes it
    "environment": dict,  # python, torch, triton, driver, ...: name -> version
    "command": str,  # what to type to measure it again
    "result": dict,  # name with its unit -> number or text
}
SAY = {
    "en": {
        "none": "Nothing has been recorded yet.",
        "no_gpu": "Not yet measured on a GPU.",
        "gpu": "{} of these records come from a GPU.",
    },
    "zh": {
        "none": "还没有任何测量记录。",
        "no_gpu": "尚未在 GPU 上测量。",
        "gpu": "其中 {} 条记录来自 GPU。",
    },
}
HEAD = {"en": ["Claim", "Result", "Where", "How to repeat it"], "zh": ["论断", "结果", "环境", "如何复现"]}


def read_record(path: Path) -> dict[str, Any]:
    """One validated record.

    Raises:
        ValueError: not JSON, or the device is neither cpu nor cuda.
        TypeError: a field is missing or of another type.
    """
    record = json.loads(path.read_text("utf-8"))
    name = f"{path.parent.name}/{path.name}"
    if not isinstance(record, dict):
        raise TypeError(f"{name}: a record is one JSON object")
    for field, kind in FIELDS.items():
        if not isinstance(record.get(field), kind):
            raise TypeError(f"{name}: {field} must be of type {kind.__name__}, got {record.get(field)!r}")
    if record["device"] not in ("cpu", "cuda"):
        raise ValueError(f'{name}: device must be "cpu" or "cuda", got {record["device"]!r}')
    return record


def read_records(root: Path = ROOT) -> list[dict[str, Any]]:
    """All records, evidence first, in the order of their file names."""
    return [read_record(path) for folder in FOLDERS for path in sorted((root / folder).glob("*.json"))]


def row(record: dict[str, Any]) -> list[list[nodes.Node]]:
    """The four cells of a record, each a list of paragraphs."""
    results = [nodes.paragraph("", f"{name}: {value}") for name, value in record["result"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in record["environment"].items())
    where = [nodes.paragraph("", record["hardware"]), nodes.paragraph("", versions)]
    commit = nodes.paragraph("", f"{record['date']}, {record['commit'][:12]}, {record['source_sha256'][:12]}")
    return [
        [nodes.paragraph("", record["claim"])],
        list(results),
        list(where),
        [nodes.paragraph("", "", nodes.literal("", record["command"])), commit],
    ]


def table(head: list[str], rows: list[list[list[nodes.Node]]]) -> nodes.table:
    group = nodes.tgroup("", *[nodes.colspec(colwidth=1) for _ in head], cols=len(head))
    group += nodes.thead("", nodes.row("", *[nodes.entry("", nodes.paragraph("", title)) for title in head]))
    group += nodes.tbody("", *[nodes.row("", *[nodes.entry("", *cell) for cell in cells]) for cells in rows])
    made = nodes.table("", group, classes=["evidence"])
    for paragraph in made.findall(nodes.paragraph):
        paragraph["translatable"] = False  # records are data; the head comes in both languages from here
    return made


class EvidenceTable(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        for folder in FOLDERS:  # a new file changes its folder, a changed one itself
            self.env.note_dependency(str(ROOT / folder))
            for path in (ROOT / folder).glob("*.json"):
                self.env.note_dependency(str(path))
        language = "zh" if (self.config.language or "").startswith("zh") else "en"
        say = SAY[language]
        try:
            records = read_records()
        except (TypeError, ValueError) as error:
            raise self.error(str(error)) from error
        on_gpu = sum(record["device"] == "cuda" for record in records)
        state = say["gpu"].format(on_gpu) if on_gpu else say["no_gpu"]
        note = nodes.admonition("", classes=["note", "gpu-state"])
        note += nodes.paragraph("", state if records else f"{say['none']} {say['no_gpu']}")
        return [note, table(HEAD[language], [row(record) for record in records])] if records else [note]


def setup(app: Sphinx) -> None:
    app.add_directive("evidence", EvidenceTable)
