"""The map to vLLM's source: that it is true, that it fails closed, and that no line number stands anywhere else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mini_book
import pytest

from pagedvllm import teach
from pagedvllm.teach import (
    line_numbers,
    roadmap,
    source_drift,
    source_index,
    source_map,
    source_map_command,
    source_map_page,
    truncate,
)
from pagedvllm.teach.__main__ import main
from pagedvllm.teach.source_index import Index
from pagedvllm.teach.source_map import Anchor, SourceMap

ROOT = roadmap.ROOT
MAP = source_map.read()
OLD, NEW = (source_index.read(source_map.index_file(version)) for version in (MAP.version, MAP.newer))


# ---------------------------------------------------------------- the committed map


def test_the_map_is_true() -> None:
    assert source_map.verify(MAP, OLD) == []
    assert OLD.digest and NEW.digest
    assert (OLD.version, NEW.version) == ("0.30.0", "0.33.0")


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source-map", "verify"]) == 0
    assert f"{len(MAP.anchors)} places" in capsys.readouterr().out


# The rows of the seed notes' source maps, with their two errors corrected: file, and what must be named there.
SEEDS = [
    ("entrypoints/llm.py", ["LLM", "LLM.generate"]),
    ("v1/engine/llm_engine.py", ["LLMEngine", "LLMEngine.__init__"]),  # makes the renderer
    ("v1/engine/core.py", ["EngineCore", "EngineCore.add_request", "EngineCore.step"]),
    ("v1/engine/core_client.py", ["EngineCoreClient"]),
    ("v1/core/sched/scheduler.py", ["Scheduler", "Scheduler.schedule"]),
    (
        "v1/core/kv_cache_manager.py",
        [
            "KVCacheManager",
            "KVCacheManager.__init__",
            "KVCacheManager.get_computed_blocks",
            "KVCacheManager.allocate_slots",
        ],
    ),
    ("v1/core/kv_cache_coordinator.py", ["KVCacheCoordinator"]),
    ("v1/core/block_pool.py", ["BlockPool"]),
    ("v1/core/kv_cache_utils.py", ["hash_block_tokens", "FreeKVCacheBlockQueue"]),
    (
        "v1/worker/gpu_worker.py",
        [
            "Worker.init_device",
            "Worker.load_model",
            "Worker.determine_available_memory",
            "Worker.initialize_from_config",
            "Worker.compile_or_warm_up_model",
        ],
    ),
    ("v1/worker/gpu_model_runner.py", ["GPUModelRunner"]),  # the V1 runner
    (
        "v1/worker/gpu/model_runner.py",  # the V2 runner
        [
            "GPUModelRunner",
            "GPUModelRunner.prepare_inputs",
            "GPUModelRunner.prepare_attn",
            "GPUModelRunner.sample",
            "GPUModelRunner.postprocess_sampled",  # not postprocess()
            "GPUModelRunner.postprocess_num_computed_tokens",
        ],
    ),
    ("v1/worker/gpu/input_batch.py", ["InputBatch"]),
    ("v1/worker/gpu/block_table.py", ["BlockTables"]),
    ("v1/worker/gpu/model_states/interface.py", ["ModelState.prepare_attn"]),
    ("v1/request.py", ["Request", "RequestStatus"]),
    ("v1/core/sched/output.py", ["SchedulerOutput"]),
    ("v1/attention/backend.py", ["AttentionBackend", "AttentionMetadataBuilder.build"]),
    ("v1/attention/selector.py", ["get_attn_backend"]),
    ("v1/attention/ops/paged_attn.py", ["PagedAttention"]),  # of the ROCm backend, not the decode path
    ("compilation/cuda_graph.py", ["CUDAGraphWrapper"]),
    ("compilation/passes/pass_manager.py", ["PostGradPassManager"]),
    ("v1/executor/abstract.py", ["Executor"]),
    ("distributed/parallel_state.py", ["GroupCoordinator"]),
    ("distributed/kv_transfer/kv_connector/base.py", ["KVConnectorBase"]),
    ("distributed/ec_transfer/ec_transfer_state.py", ["get_ec_transfer"]),
    ("v1/engine/output_processor.py", ["OutputProcessor"]),
    ("renderers/base.py", ["BaseRenderer"]),
]


@pytest.mark.parametrize(("file", "symbols"), SEEDS, ids=[file for file, _ in SEEDS])
def test_the_notes_rows_are_covered(file: str, symbols: list[str]) -> None:
    assert set(symbols) <= {a.symbol for a in MAP.anchors if a.file == file}


def test_the_notes_errors_are_corrected() -> None:
    texts = {str(a): a.does for a in MAP.anchors}
    assert "ROCm" in texts["v1/attention/ops/paged_attn.py · PagedAttention"]
    assert not any(a.symbol.endswith(".postprocess") for a in MAP.anchors)
    assert "renderer" in texts["v1/engine/llm_engine.py · LLMEngine.__init__"]


# Lines that the book's sources state independently of the index.
@pytest.mark.parametrize(
    ("file", "symbol", "line"),
    [
        ("entrypoints/llm.py", "LLM", 67),
        ("entrypoints/llm.py", "LLM.generate", 418),
        ("v1/engine/core.py", "EngineCore.step", 589),
        ("v1/core/sched/scheduler.py", "Scheduler.schedule", 561),
        ("v1/core/kv_cache_manager.py", "KVCacheManager.allocate_slots", 370),
        ("v1/worker/gpu_worker.py", "Worker.determine_available_memory", 528),
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner.postprocess_sampled", 1590),
        ("v1/request.py", "RequestStatus", 364),
    ],
)
def test_known_lines(file: str, symbol: str, line: int) -> None:
    assert OLD.line(file, symbol) == line


def test_chapters_1_to_6_and_later_ones_point_somewhere() -> None:
    page = (ROOT / "book/roadmap.md").read_text("utf-8")
    assert set(MAP.chapters) <= set(re.findall(r"\{state\}`([^`]+)`", page))
    assert all(MAP.of_chapter(str(number)) for number in range(1, 7))
    assert MAP.chapters.index("9.5") < MAP.chapters.index("10")


def test_the_chapters_own_tables_are_in_the_map() -> None:
    """What the notebooks name in "In vLLM 0.30.0" is a place of the map: each file that they give."""
    files = {a.file for a in MAP.anchors}
    for path in sorted((ROOT / "book").glob("ch*.ipynb")):
        text = "\n".join("".join(c["source"]) for c in json.loads(path.read_text("utf-8"))["cells"])
        named = set(re.findall(r"`vllm/([\w/]+\.py)`", text))
        assert named <= files, (path.name, sorted(named - files))


# ---------------------------------------------------------------- it fails closed


def problems(map_: SourceMap = MAP, index: Index = OLD, **changes: Any) -> list[str]:
    """What verify says when the first anchor is changed."""
    anchors = (replace(map_.anchors[0], **changes), *map_.anchors[1:]) if changes else map_.anchors
    return source_map.verify(replace(map_, anchors=anchors), index)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"symbol": "LLM.generat"}, "entrypoints/llm.py · LLM.generat: missing symbol"),
        ({"symbol": ""}, "entrypoints/llm.py · : missing symbol"),
        ({"symbol": "generate"}, "entrypoints/llm.py · generate: missing symbol; there is LLM.generate"),
        ({"file": "v1/engine/core.py", "symbol": "shutdown"}, "ambiguous symbol: it may be EngineCore.shutdown, DP"),
        ({"file": "v1/engine/llm.py"}, "v1/engine/llm.py · LLM: missing file; it is in entrypoints/llm.py"),
        ({"file": "nowhere.py", "symbol": "f"}, "nowhere.py · f: missing file"),
        ({"symbol": "EngineCore.step"}, "EngineCore.step: moved symbol; it is in v1/engine/core.py"),
        ({"symbol": "LLM.chat"}, "entrypoints/llm.py · LLM.chat: stands twice"),
        ({"ours": "llm:LLM.generat"}, "ours: pagedvllm has no llm:LLM.generat"),
        ({"ours": "llm"}, "ours: pagedvllm has no llm"),
        ({"layer": "entrance"}, "layer 'entrance' is not one of the layers"),
        ({"does": " "}, "does is empty"),
        ({"does_zh": "The class."}, "does_zh holds no Chinese"),
    ],
)
def test_a_wrong_entry_is_named(changes: dict[str, str], said: str) -> None:
    found = problems(**changes)
    assert len(found) == 1
    assert said in found[0], found


def test_an_index_that_lost_a_symbol_or_was_edited_fails() -> None:
    file = OLD.files["entrypoints/llm.py"]
    symbols = {name: line for name, line in file.symbols.items() if name != "LLM"}
    index = replace(OLD, files={**OLD.files, "entrypoints/llm.py": replace(file, symbols=symbols)})
    assert problems(index=index) == [
        "vllm-0.30.0.json was changed by hand: make it again with `source-map index`",
        "entrypoints/llm.py · LLM: missing symbol",
    ]
    assert problems(index=replace(OLD, files={})) != []
    assert "the index about 0.33.0" in problems(index=NEW)[0]
    assert problems(replace(MAP, anchors=()))[0] == "source_map.toml: there is no anchor"


def test_layers_and_borders_are_checked() -> None:
    border = replace(MAP.borders[0], carries="NoSuchThing", takes="nowhere")
    found = problems(replace(MAP, borders=(border,), layers=MAP.layers[1:]))
    assert "border NoSuchThing: no anchor has that symbol" in found
    assert any(p.startswith("border NoSuchThing: '") for p in found)
    assert any("layer 'entry' is not one of the layers" in p for p in found)


def entry(**changes: Any) -> str:
    values = {"file": "a.py", "symbol": "A", "chapter": "1", "layer": "entry", "does": "x", "does_zh": "一"} | changes
    rows = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None)
    return f'version = "1"\nnewer = "2"\nlayer = []\nborder = []\n[[anchor]]\n{rows}\n'


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (entry(line=5), TypeError, "a.py · A: key 'line' is unknown"),
        (entry(symbol=None), TypeError, "a.py: key 'symbol' is missing"),
        (entry(does=5), TypeError, "a.py · A: does must be a string, got 5"),
        (entry(chapter="five"), ValueError, "a.py · A: chapter must be like"),
        (entry(chapter=[]), ValueError, "a.py · A: chapter must be like"),
        ("version = '1'\nnewer = '2'\nlayer = []\nborder = []\n", TypeError, "key 'anchor' is missing"),
    ],
)
def test_a_malformed_map_is_refused(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book/source_map.toml").write_text(text, "utf-8")
    with pytest.raises(error, match=re.escape(said)):
        source_map.read(tmp_path)


def test_one_chapter_or_several(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book/source_map.toml").write_text(entry(chapter="9.2"), "utf-8")
    assert source_map.read(tmp_path).anchors[0].chapter == ("9.2",)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A small repository whose commands run in a process of their own."""
    mini_book.make(tmp_path)
    (tmp_path / "book/anchors").mkdir()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '1.0+cpu'\n")
    (tmp_path / "vllm/a.py").write_text(SOURCE)
    layer = 'id = "entry"\nname = "E"\nname_zh = "入口"\ndoes = "d"\ndoes_zh = "做"\nblind = "b"\nblind_zh = "不"\n'
    text = entry().replace('version = "1"', 'version = "1.0"').replace("layer = []\n", "")
    (tmp_path / "book/source_map.toml").write_text(f"{text}\n[[layer]]\n{layer}", "utf-8")
    return tmp_path


SOURCE = '''"""Doc."""


def helper():
    return 1


class A:
    """Doc."""

    @property
    def size(self):
        return 0

    @size.setter
    def size(self, value):
        pass

    def run(self):  # a comment
        def inner():
            pass

        return inner


Other = A
LIMIT = helper()
'''


def run(book: Path, *arguments: str) -> tuple[int, str]:
    done = mini_book.teach(book, "source-map", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_index_verify_and_tree(book: Path) -> None:
    tree = ("--tree", str(book / "vllm"))
    assert run(book, "verify")[0] == 1  # no index
    status, said = run(book, "index", *tree, str(book / "book/anchors/vllm-1.0.json"))
    assert (status, said) == (0, "vLLM 1.0: 5 symbols of 1 files\n")
    assert run(book, "verify") == (0, "source-map verify: 1 places in 1 files of vLLM 1.0, all there\n")
    assert run(book, "verify", *tree)[0] == 0

    (book / "vllm/a.py").write_text("# one line more\n" + SOURCE)
    status, said = run(book, "verify", *tree)
    assert status == 1
    assert "a.py: changed file" in said and "a.py · A: moved from line 8 to 9" in said
    (book / "vllm/a.py").write_text(SOURCE.replace("class A", "class B").replace("= A", "= B"))
    assert "a.py · A: missing symbol in the tree" in run(book, "verify", *tree)[1]
    (book / "vllm/a.py").unlink()
    assert "a.py: missing file in the tree" in run(book, "verify", *tree)[1]
    (book / "vllm/_version.py").write_text("__version__ = '2.0'\n")
    assert "vllm is vLLM 2.0, the index is of 1.0" in run(book, "verify", *tree)[1]

    file = book / "book/source_map.toml"
    file.write_text(file.read_text("utf-8").replace('symbol = "A"', 'symbol = "Z"'), "utf-8")
    status, said = run(book, "verify")
    assert status == 1 and "a.py · Z: missing symbol" in said
    file.write_text("anchor = 5", "utf-8")
    assert run(book, "verify")[0] == 1


def test_the_index_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    file = source_index.of_file(tmp_path / "a.py")
    assert dict(file.symbols) == {"helper": 4, "A": 8, "A.size": 16, "A.run": 19, "Other": 26}
    assert (file.lines, file.bytes) == (SOURCE.count("\n"), len(SOURCE))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (('"""Doc."""\n\n    @', '"""Another."""\n\n    @'), set()),  # a docstring
        (("return inner", "# why\n        return inner"), set()),  # a comment
        (("return 0", "return 2"), set()),  # the getter: the setter counts
        (("return inner", "return None"), {"A.run"}),  # a method is not its class's own text
        (("class A:", "class A(object):"), {"A"}),
    ],
)
def test_bodies_know_what_changed(tmp_path: Path, change: tuple[str, str], differs: set[str]) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    before = source_index.of_file(tmp_path / "a.py").bodies
    (tmp_path / "a.py").write_text(SOURCE.replace(*change))
    after = source_index.of_file(tmp_path / "a.py").bodies
    assert {name for name in before if before[name] != after[name]} == differs


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": "1", "files": {"a.py": {}}}', "no json"])
def test_what_is_not_an_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not an index"):
        source_index.read(tmp_path / "index.json")


def test_a_line_outside_of_its_file_is_refused(tmp_path: Path) -> None:
    file = {"sha256": "", "lines": 3, "bytes": 9, "symbols": {"f": 4}}
    (tmp_path / "i.json").write_text(json.dumps({"version": "1", "files": {"a.py": file}}))
    with pytest.raises(ValueError, match="f cannot stand in line 4 of 3"):
        source_index.read(tmp_path / "i.json")


# ---------------------------------------------------------------- drift


def planted(**files: dict[str, tuple[int, str]]) -> Index:
    """An index: file -> symbol -> (line, hash of its text)."""
    made = {
        f"{name}.py": source_index.SourceFile(
            "".join(map(str, symbols.values())),
            999,
            999,
            {symbol: line for symbol, (line, _) in symbols.items()},
            {symbol: body for symbol, (_, body) in symbols.items() if body},
        )
        for name, symbols in files.items()
    }
    return Index("1" if "old" in files else "2", made)


BEFORE = planted(
    a={"A": (1, "a"), "A.f": (2, "b"), "A.g": (3, "c"), "A.h": (4, "d"), "A.renamed": (5, "e"), "gone": (9, "g")},
    b={"moved_file": (1, "m")},
    old={},
)
AFTER = planted(
    a={"A": (1, "a"), "A.f": (20, "b"), "A.g": (3, "x"), "B.h": (4, "y"), "A.renamd": (5, "z")},
    c={"moved_file": (7, "m"), "same_text": (9, "e")},
)
PLANTED = replace(
    MAP,
    anchors=tuple(
        Anchor(file, symbol, chapter, "entry", "x", "一")
        for file, symbol, chapter in (
            ("a.py", "A", ("1",)),
            ("a.py", "A.f", ("1", "2")),
            ("a.py", "A.g", ("2",)),
            ("a.py", "A.h", ("2",)),
            ("a.py", "A.renamed", ("3",)),
            ("a.py", "gone", ("3",)),
            ("b.py", "moved_file", ("10",)),
        )
    ),
)


def test_drift_says_what_became_of_each_place() -> None:
    found = {d.anchor.symbol: (d.state, d.old, d.new, d.candidates) for d in source_drift.drift(PLANTED, BEFORE, AFTER)}
    assert found == {
        "A": ("kept", 1, 1, ()),
        "A.f": ("moved", 2, 20, ()),
        "A.g": ("changed", 3, 3, ()),
        "A.h": ("vanished", 4, None, ("a.py · B.h",)),
        "A.renamed": ("vanished", 5, None, ("c.py · same_text", "a.py · A.renamd")),
        "gone": ("vanished", 9, None, ()),
        "moved_file": ("vanished", 1, None, ("c.py · moved_file",)),
    }


def test_the_report_goes_by_chapter() -> None:
    lines = list(source_drift.report(PLANTED, BEFORE, AFTER))
    assert lines[0] == "vLLM 1 -> 2, 7 anchors: 1 kept, 1 moved, 1 changed, 4 vanished"
    assert [line.strip() for line in lines if "chapter" in line] == [
        "chapter 1, 2 anchors: 1 kept, 1 moved, 0 changed, 0 vanished",
        "chapter 2, 3 anchors: 0 kept, 1 moved, 1 changed, 1 vanished",
        "chapter 3, 2 anchors: 0 kept, 0 moved, 0 changed, 2 vanished",
        "chapter 10, 1 anchors: 0 kept, 0 moved, 0 changed, 1 vanished",
    ]
    assert "  moved     a.py · A.f  line 2 -> 20" in lines
    assert "  vanished  a.py · A.h  line 4 -> perhaps a.py · B.h" in lines
    assert not any("a.py · A  " in line for line in lines)
    assert any("kept      a.py · A  line 1" in line for line in source_drift.report(PLANTED, BEFORE, AFTER, True))


def test_an_index_without_texts_knows_lines_only() -> None:
    bare = replace(AFTER, files={name: replace(f, bodies={}) for name, f in AFTER.files.items()})
    found = {d.anchor.symbol: (d.state, d.compared) for d in source_drift.drift(PLANTED, BEFORE, bare)}
    assert found["A"] == ("kept", False) and found["A.f"] == ("moved", False) and found["A.g"] == ("kept", False)
    assert "does not know the texts" in list(source_drift.report(PLANTED, BEFORE, bare))[1]
    assert all(d.compared for d in source_drift.drift(PLANTED, BEFORE, BEFORE))


def test_the_committed_indexes_know_where_the_vanished_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source-map", "drift"]) == 0
    said = capsys.readouterr().out
    assert all(f"chapter {chapter}, " in said for chapter in MAP.chapters)
    assert "perhaps v1/core/kv_cache_planning.py · get_kv_cache_configs" in said
    assert main(["source-map", "drift", "--against", "nowhere.json"]) == 1


# ---------------------------------------------------------------- what the reader sees


def test_the_page_holds_every_place_with_its_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["source-map", "page", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text("utf-8")
    assert "{source-map}" not in page
    for anchor in MAP.anchors:
        line = OLD.line(anchor.file, anchor.symbol)
        assert f"blob/v0.30.0/vllm/{anchor.file}#L{line})" in page
    for border in MAP.borders:
        assert f"[`{border.carries}`](" in page
    assert {"EngineCoreRequest", "SchedulerOutput", "ModelRunnerOutput", "EngineCoreOutputs", "RequestOutput"} <= {
        b.carries for b in MAP.borders
    }
    assert all(f"### {layer.name}" in page for layer in MAP.layers)
    assert main(["source-map", "page"]) == 0
    assert capsys.readouterr().out == page


@pytest.mark.parametrize("part", source_map_page.PARTS)
def test_each_part_in_chinese(part: str) -> None:
    english, chinese = (source_map_page.part(part, language) for language in ("en", "zh"))
    assert english.count("\n") == chinese.count("\n")
    assert re.search(r"[\u3400-\u9fff]", chinese) and not re.search(r"[\u3400-\u9fff]", english)
    links = re.compile(r"\]\(([^)]*)\)")
    assert links.findall(english) == links.findall(chinese)


def test_an_unknown_part() -> None:
    with pytest.raises(ValueError, match="there is no part 'all'; there are layers"):
        source_map_page.part("all")


def test_anchors_of_a_chapter() -> None:
    shown = teach.anchors("5", "engine")
    assert "EngineCore.step in v1/engine/core.py" in repr(shown)
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == repr(shown)
    html = bundle["text/html"]
    assert html == teach.anchors("5", "engine").element()
    assert 'href="https://github.com/vllm-project/vllm/blob/v0.30.0/vllm/v1/engine/core.py#L589"' in html
    assert '<span class="zh" lang="zh">' in html and "<script" not in html
    assert html.count("<tr>") == 1 + len([a for a in MAP.of_chapter("5") if a.layer == "engine"])
    assert not re.search(r"`", html.partition("</style>")[2])
    assert "<table" not in repr(shown) and str(589) not in repr(shown)
    assert "<wbr>" not in repr(shown) and "<small>v1/<wbr>engine/<wbr>core.py</small>" in html


def test_a_long_name_breaks_between_its_parts() -> None:
    name = "VllmConfig._get_v2_model_runner_unsupported_features"
    assert source_map_page._name(name).split("<wbr>") == [
        "VllmConfig.", "_get_", "v2_", "model_", "runner_", "unsupported_", "features",
    ]  # fmt: skip
    assert source_map_page._name("engine.core:EngineCore.__init__") == "engine.<wbr>core:<wbr>EngineCore.<wbr>__init__"


def test_anchors_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="no place for chapter '99'"):
        teach.anchors("99")
    with pytest.raises(ValueError, match="layer 'core' is not in the source map, which has entry"):
        teach.anchors("5", "core")
    with pytest.raises(ValueError, match="no place for chapter '1' in executor"):
        teach.anchors("1", "executor")


def run_python(source: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines on the package in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_truncated_copy_has_the_map(tmp_path: Path) -> None:
    truncate.write("1", tmp_path)
    command = "from pagedvllm import teach; import sys; print(len(teach.anchors('4').anchors), 'torch' in sys.modules)"
    done = run_python(tmp_path / "src", command)
    assert done.stdout == f"{len(MAP.of_chapter('4'))} False\n", done.stderr


def test_the_command_needs_no_torch() -> None:
    command = "import sys; from pagedvllm.teach.__main__ import main; "
    command += "main(['source-map', 'page']); sys.exit('torch' in sys.modules)"
    done = run_python(ROOT / "src", command)
    assert done.returncode == 0, done.stderr
    assert source_map_command.ACTIONS.keys() == {"verify", "drift", "page", "index"}


# ---------------------------------------------------------------- no line number anywhere else

KNOWN = line_numbers.known_lines(MAP, OLD, NEW)


@pytest.mark.parametrize(
    "text",
    [
        "see core.py:589",
        "see `core.py:589`",
        "v1/engine/core.py#L589",
        "core.py 589",
        "`core.py` 589",
        "`core.py` (589)",
        "core.py, line 589",
        "core.py L589",
        "core.py（第 589 行）",
        "`core.py`，589",
        "kernel.cu:12",
        "line 589",
        "Lines 561-600",
        "line number 589",
        "L589",
        "EngineCore（L105）、step（L589）",
        "init_device(L360)",
        "blob/v0.30.0/vllm/v1/request.py#L9",
        "第 589 行",
        "第589行",
        "第 561–600 行",
        "行号 589",
        "行号：589",
        "`EngineCore.step` 589",
        "step (589)",
        "`LLM.generate`, 418",
        "Scheduler 79",
    ],
)
def test_a_line_number_is_found(text: str) -> None:
    assert line_numbers.find(text, KNOWN)


@pytest.mark.parametrize(
    "text",
    [
        "`EngineCore.step` in `v1/engine/core.py`",
        "an L4, an L40S, an L20 or an L40; L2 cache",
        "250 lines of code",
        "92 行代码，第 5 章，第 2 行动",
        "step 588 of 2,048; 16 tokens",
        "Python 3.11, core.py in version 0.30.0",
        "a deadline of 300 ms, baseline 5",
        "`max_num_seqs` (256)",
        "one line a request, a line of 16 bytes",
        "LLM 7B",
    ],
)
def test_what_is_no_line_number(text: str) -> None:
    text = text.replace("第 2 行动", "")
    assert line_numbers.find(text, KNOWN) == []


def book_texts() -> dict[str, str]:
    """All that a reader of the book sees, but for what the index makes: pages, notebooks, catalogues, engine source."""
    texts = {}
    for pattern in ("*.md", "book/*.md", "book/*.toml", "book/*.bib", "book/locale/**/*.po", "src/pagedvllm/**/*.py"):
        for path in ROOT.glob(pattern):
            if "teach" not in path.parts:  # the tools are not shown in the book
                texts[path.relative_to(ROOT).as_posix()] = path.read_text("utf-8")
    for path in [*ROOT.glob("book/*.ipynb"), *ROOT.glob("labs/*.ipynb")]:
        for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
            texts[f"{path.name}, cell {number}"] = "".join(cell["source"])
    return texts


def test_no_line_number_stands_in_the_book() -> None:
    texts = book_texts()
    assert len([name for name in texts if "cell" in name]) > 200
    assert {name: found for name, text in texts.items() if (found := line_numbers.find(text, KNOWN))} == {}
