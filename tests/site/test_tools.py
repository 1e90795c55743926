"""The tools that build and check the site."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import polib
import pytest
from docutils import nodes
from docutils.utils import new_document
from site_support import ROOT  # first: it puts the tools on the path

import catalogues  # isort: skip
import stages  # isort: skip
import vendor  # isort: skip
from bookext import chapters, evidence, llms, page, search  # isort: skip


def write_catalogue(file: Path, messages: dict[str, str], fuzzy: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    catalogue = polib.POFile()
    for msgid, msgstr in messages.items():
        catalogue.append(polib.POEntry(msgid=msgid, msgstr=msgstr, flags=["fuzzy"] if fuzzy else []))
    catalogue.save(str(file))


GOOD = {
    "Read the `code` first.": "先读 `code`。",
    "See {chapter}`1` and [the glossary](glossary.md).": "见 {chapter}`1` 和[术语表](glossary.md)。",
    "Mass is $m$ here.": "这里质量是 $m$。",
    "{state}`1`": "",
    "7.1": "",
    r"n = \frac{a}{b} \text{ B}": "",
    "SmolLM2": "SmolLM2",
}
BAD = {
    "untranslated": {"Read the `code` first.": ""},
    "markup differs: ['`code`'] became []": {"Read the `code` first.": "先读代码。"},
    "markup differs: ['](glossary.md)', '{chapter}`1`'] became ['](glossary.md)', '{chapter}`2`']": {
        "See {chapter}`1` and [the glossary](glossary.md).": "见 {chapter}`2` 和[术语表](glossary.md)。"
    },
    "markup differs: ['$m$'] became ['$M$']": {"Mass is $m$ here.": "这里质量是 $M$。"},
    "no Chinese in the translation": {"Read the manual page first.": "Read the manual page first."},
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "pot", tmp_path / "po"


def test_a_whole_catalogue_passes(folders: tuple[Path, Path]) -> None:
    pot, po = folders
    write_catalogue(pot / "book/a.pot", dict.fromkeys(GOOD, ""))
    write_catalogue(po / "book/a.po", GOOD)
    assert catalogues.check(pot, po, set()) == []


@pytest.mark.parametrize("reason", BAD)
def test_a_damaged_message_fails(folders: tuple[Path, Path], reason: str) -> None:
    pot, po = folders
    write_catalogue(pot / "book/a.pot", dict.fromkeys(BAD[reason], ""))
    write_catalogue(po / "book/a.po", BAD[reason])
    (complaint,) = catalogues.check(pot, po, set())
    assert complaint.startswith(f"book/a.po: {reason}: ")
    assert catalogues.check(pot, po, {"book/a"}) == []  # a chapter that waits for its translation


def test_fuzzy_stale_and_missing_fail(folders: tuple[Path, Path]) -> None:
    pot, po = folders
    write_catalogue(pot / "a.pot", {"One new thing here.": ""})
    assert catalogues.check(pot, po, set()) == ["a.po: missing, run make zh"]
    write_catalogue(po / "a.po", {"One new thing here.": "一件新事。"}, fuzzy=True)
    assert "fuzzy" in catalogues.check(pot, po, set())[0]
    write_catalogue(po / "a.po", {"One old thing here.": "一件旧事。"})
    assert [line.split(":")[1] for line in catalogues.check(pot, po, set())] == [
        " not in the catalogue, run make zh",
        " no longer in the book, run make zh",
    ]
    write_catalogue(po / "gone.po", {})
    assert catalogues.check(pot, po, {"a"}) == ["gone.po: its page is gone"]


def test_a_reference_may_gain_a_title() -> None:
    assert catalogues.kept("the {term}`KV cache`") == catalogues.kept("{term}`键值缓存 <KV cache>`")


def archive(files: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return memory.getvalue()


def test_vendor_takes_the_wanted_files(tmp_path: Path) -> None:
    file = tmp_path / "x.tgz"
    file.write_bytes(
        archive({"dist/a.mjs": b"a", "dist/chunks/b.mjs": b"b", "dist/chunks/b.mjs.map": b"m", "src/c": b"c"})
    )
    vendor.unpack(file, {"dist/a.mjs": "a.mjs", "dist/chunks/": "chunks/"}, tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == ["a.mjs", "chunks/b.mjs"]
    with pytest.raises(SystemExit, match=r"x\.tgz holds no LICENSE"):
        vendor.unpack(file, {"LICENSE": "LICENSE"}, tmp_path / "out")


def test_vendor_refuses_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "CACHE", tmp_path)
    content = archive({"LICENSE": b""})
    package = {"name": "x", "version": "1", "megabytes": 1, "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "x-1.tgz").write_bytes(content)
    assert vendor.fetch(package, {}) == tmp_path / "x-1.tgz"
    (tmp_path / "x-1.tgz").write_bytes(content + b"!")
    with pytest.raises(SystemExit, match="sha256"):
        vendor.fetch(package, {})
    assert not (tmp_path / "x-1.tgz").exists()


def test_stages_stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def stage(name: str, code: str) -> stages.Stage:
        return stages.Stage(name, "something", (stages.python("-c", code),))

    monkeypatch.setattr(sys, "argv", ["stages.py"])
    good, bad = stage("good", "print('3 passed in 0.12s')"), stage("bad", "raise SystemExit(3)")
    monkeypatch.setattr(stages, "STAGES", (good, bad, stage("after", "print('not reached')")))
    assert stages.main() == 1
    shown = capfd.readouterr().out
    assert "bad: FAILED (exit status 3)" in shown
    assert "not reached" not in shown
    assert "not run: after" in shown
    assert shown.split("== Summary")[1].count("3 passed in 0.12s") == 1
    monkeypatch.setattr(stages, "STAGES", (good,))
    assert stages.main() == 0
    with pytest.raises(SystemExit, match="no stage 'x'"):
        stages.chosen(["x"])


def test_make_venv_says_what_is_missing(tmp_path: Path) -> None:
    script = ROOT / "book/_tools/make_venv.sh"
    environment = {**os.environ, "PYTHON": "no-such-python"}
    command = ["sh", str(script), str(tmp_path / "venv")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, and no-such-python is not that" in done.stderr
    assert not (tmp_path / "venv").exists()


RECORD: dict[str, Any] = {
    "claim": "A decode step takes 20 ms.",
    "hardware": "a test",
    "device": "cuda",
    "date": "2026-01-01",
    "commit": "0" * 40,
    "source_sha256": "1" * 64,
    "environment": {"torch": "2.13.0"},
    "command": "pagedvllm check",
    "result": {"step, ms": 20},
}


def test_evidence_records(tmp_path: Path) -> None:
    for folder in evidence.FOLDERS:
        (tmp_path / folder).mkdir()
    assert evidence.read_records(tmp_path) == []
    file = tmp_path / "evidence/a.json"
    file.write_text(json.dumps(RECORD))
    assert evidence.read_records(tmp_path) == [RECORD]
    text = evidence.table(evidence.HEAD["en"], [evidence.row(RECORD)]).astext()
    assert "A decode step takes 20 ms." in text
    assert "pagedvllm check" in text
    for field in RECORD:
        file.write_text(json.dumps({name: value for name, value in RECORD.items() if name != field}))
        with pytest.raises(TypeError, match=rf"evidence/a\.json: {field} must be"):
            evidence.read_records(tmp_path)
    file.write_text(json.dumps({**RECORD, "device": "gpu"}))
    with pytest.raises(ValueError, match="device must be"):
        evidence.read_records(tmp_path)


def test_reading_minutes() -> None:
    document = new_document("page")
    document += nodes.paragraph("", " ".join(["word"] * 400))
    assert page.reading_minutes(document) == 2
    document += nodes.paragraph("", "字" * 700)
    assert page.reading_minutes(document) == 4
    document += nodes.literal_block("", "\n".join(["x = 1", ""] * 40))
    assert page.reading_minutes(document) == 6


def test_chinese_search_splits_into_pairs() -> None:
    splitter = search.SearchChineseBigrams({})
    assert splitter.split("调度器 schedules") == ["调", "度", "器", "调度", "度器", "schedules"]
    assert splitter.word_filter("度")
    assert not splitter.word_filter("a")


def test_waiting_for_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"2": {"id": "2", "notebook": "book/ch02.ipynb", "lab": "labs/lab02.ipynb", "zh": "none"}}
    monkeypatch.setattr(page, "standing", lambda: table)
    assert page.waiting_for_translation("book/ch02") == "english"
    assert page.waiting_for_translation("labs/lab02") == "english"
    assert page.waiting_for_translation("book/source/pagedvllm.llm") == "source"
    assert page.waiting_for_translation("book/index") is None
    table["2"]["zh"] = "done"
    assert page.waiting_for_translation("book/ch02") is None


def test_the_roadmap_is_read() -> None:
    assert chapters.standing()["1"]["notebook"] == "book/ch01_smallest_example.ipynb"


def test_a_notebook_as_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "a.ipynb"
    outputs = [
        {"output_type": "stream", "text": ["Paris\n"]},
        {"output_type": "display_data", "data": {"image/svg+xml": "<svg/>", "text/plain": "<Figure>"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["generate()"], "outputs": outputs},
    ]
    file.write_text(json.dumps({"cells": cells}))
    assert llms.plain_text(file) == "# Title\n\n```python\ngenerate()\n```\n\n```text\nParis\n```"
