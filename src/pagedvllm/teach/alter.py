"""The second pass over the notebooks: does a wrong output fail, and does every live cell take effect?

Each notebook is copied, one stored output of the copy is altered, and the copy is run by nbval with
PAGEDVLLM_LIVE=always, so that every live cell is installed though it equals the package. Exactly the altered cells must
fail. Which cell is altered depends on the notebook's content: it changes when the notebook does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from pagedvllm.teach import notebooks, roadmap

COPIES = roadmap.ROOT / "_build" / "alter"
UNCHECKED = (notebooks.IGNORED, "nbval-skip")


def alter(paths: list[Path], workers: int = 2) -> int:
    """Run the second pass. Returns an exit status: 0 when exactly the altered cells failed."""
    shutil.rmtree(COPIES, ignore_errors=True)
    expected: set[str] = set()
    copies: list[Path] = []
    for path in paths:
        relative = path.resolve().relative_to(roadmap.ROOT)
        notebook = notebooks.read(path)
        number = altered_cell(notebook)
        if number is None:
            print(f"{relative}: has no output to alter")
        else:
            cell = notebooks.code_cells(notebook)[number]
            alter_output(cell)
            expected.add(_name(relative, f"Cell {number}"))
            print(f"{relative}: output of cell {number} ({cell.id}) altered")
        copies.append(COPIES / relative)
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        notebooks.write(copies[-1], notebook)
    return _compare(expected, *_run(copies, workers))


def altered_cell(notebook: Any) -> int | None:
    """Which code cell to alter: one whose output nbval compares, chosen by the notebook's own content."""
    cells = notebooks.code_cells(notebook)
    candidates = [i for i, c in enumerate(cells) if not set(UNCHECKED) & set(notebooks.tags(c)) and _texts(c)]
    if not candidates:
        return None
    content = "".join(c.source + repr(_texts(c)) for c in cells)
    return candidates[int(notebooks.digest(content), 16) % len(candidates)]


def _texts(cell: Any) -> list[tuple[Any, str]]:
    """(holder, key) of each text in a cell's outputs that nbval compares."""
    found: list[tuple[Any, str]] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append((output, "text"))
        elif output.output_type in ("display_data", "execute_result"):
            found += [(output.data, k) for k in sorted(output.data) if not k.startswith("image/")]
    return [(holder, key) for holder, key in found if isinstance(holder[key], str) and holder[key].strip()]


def alter_output(cell: Any) -> None:
    """Change one character, in the middle of the last compared text of the cell."""
    holder, key = _texts(cell)[-1]
    text = holder[key]
    middle = min((i for i, c in enumerate(text) if c.isalnum()), key=lambda i: abs(i - len(text) // 2), default=0)
    holder[key] = text[:middle] + ("7" if text[middle] != "7" else "8") + text[middle + 1 :]


def _name(relative: Path, item: str) -> str:
    """As pytest's JUnit report calls an item: the path with dots, and the name."""
    return ".".join([*COPIES.relative_to(roadmap.ROOT).parts, *relative.parts]) + f" {item}"


def _run(copies: list[Path], workers: int) -> tuple[int, dict[str, bool]]:
    """(exit status of pytest, item -> passed)"""
    report = COPIES / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command += ["-n", str(min(workers, len(copies))), "--dist", "loadfile", *map(str, copies)]
    environment = {**os.environ, "PAGEDVLLM_LIVE": "always", "PAGEDVLLM_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=roadmap.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if not report.exists():
        print(done.stdout)
        return done.returncode, {}
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        outcomes[f"{case.get('classname')} {case.get('name')}"] = not bad
    return done.returncode, outcomes


def _compare(expected: set[str], status: int, outcomes: dict[str, bool]) -> int:
    failed = {name for name, passed in outcomes.items() if not passed}
    for name in sorted(failed - expected):
        print(f"failed, and nothing was altered there: {name}")
    for name in sorted(expected - failed):
        print(f"{'passed, although its output was altered' if name in outcomes else 'did not run'}: {name}")
    fine = failed == expected and len(outcomes) > len(expected) and status == (1 if expected else 0)
    verdict = "as it must be" if fine else "WRONG"
    print(f"{len(outcomes)} cells and checks ran, {len(expected)} altered, {len(failed)} failed: {verdict}")
    return 0 if fine else 1
