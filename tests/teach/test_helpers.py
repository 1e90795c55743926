"""The roadmap, figures, errors, margins, Colab, and what all notebooks share."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from pagedvllm import teach
from pagedvllm.teach import colab, helpers, notebooks, roadmap

ROOT = Path(__file__).resolve().parents[2]


def test_roadmap():
    assert teach.chapter("1") == {"engine": "reference"}
    with pytest.raises(ValueError, match="chapter '99' is not in roadmap"):
        teach.chapter("99")
    teach.chapter("1")["engine"] = "other"
    assert teach.chapter("1") == {"engine": "reference"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('id = "1"\ntitle = "a"\nmodels = 3', TypeError),
        ('id = "1"\ntitle = "a"\n[[chapter]]\nid = "1"\ntitle = ""', ValueError),
    ],
)
def test_roadmap_says_what_is_wrong(tmp_path, text, error):
    (tmp_path / "book").mkdir()
    (tmp_path / "book/roadmap.toml").write_text(f"[[chapter]]\n{text}\n")
    with pytest.raises(error, match=r"roadmap\.toml"):
        roadmap.read(tmp_path)


def test_show_error(capsys):
    with teach.show_error():
        raise ValueError("top_p must be in (0, 1], got 2")
    assert capsys.readouterr().out == "ValueError: top_p must be in (0, 1], got 2\n"
    with pytest.raises(AssertionError, match="was meant to raise"), teach.show_error():
        pass
    with pytest.raises(KeyError), teach.show_error(ValueError):
        raise KeyError("x")


def test_margin_ok():
    import torch

    assert teach.margin_ok([[1.0, 3.0, 2.0], torch.tensor([[0.0, 9.0]])])
    assert teach.margin_ok(torch.tensor([[1.0, 2.0], [5.0, 3.0]]))
    with pytest.raises(AssertionError, match=r"step 1: the two best logits are 0\.0100 apart"):
        teach.margin_ok([[1.0, 3.0], [1.0, 1.01]])
    with pytest.raises(ValueError, match="no step"):
        teach.margin_ok([])


def test_figures_are_deterministic_readable_and_described(capsys):
    from pagedvllm.teach import style

    def drawn() -> str:
        fig, (left, right) = teach.figure(6, 3, columns=2)
        left.plot([0, 1 / 3, 2], [1, 2, 3], label="a")
        left.legend()
        right.bar(["x"], [2])
        return style.svg(fig)

    one, two = drawn(), drawn()
    assert one == two and len(one) < 60_000 and "<dc:date>" not in one and "Matplotlib" not in one
    assert not re.search(r"(?<!scale\()-?\b\d+\.\d{3,}", re.sub(r"scale\([^)]*\)", "", one))
    fig, axis = teach.figure()
    axis.set_title("small", fontsize=7)
    with pytest.raises(ValueError, match="'small' has 7 points"):
        teach.show(fig, alt="x")
    with pytest.raises(ValueError, match="alt"):
        teach.show(teach.figure()[0], alt=" ")


def test_show_gives_an_image_with_its_text(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    teach.bars({1: 2.0, 16: 1.0}, "ms per step", alt='Two "bars" & more')
    teach.lines({"a": ([1, 2], [3, 4])}, "tokens", "ms", alt="One line")
    html = shown[0]["text/html"]
    assert 'alt="Two &quot;bars&quot; &amp; more"' in html and shown[1]["text/plain"] == "[figure] One line"
    picture = base64.b64decode(html.split("base64,")[1].split('"')[0])
    assert picture.startswith(b"<?xml") and b"</svg>" in picture


def contrast(a: str, b: str) -> float:
    """WCAG 2: relative luminances, lighter over darker."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_text_and_colors():
    from pagedvllm.teach import style

    assert contrast(style.INK, style.PANEL) > 10
    assert all(contrast(c, style.PANEL) > 1.9 for c in style.COLORS)


def test_setup_prints_one_line(capsys, monkeypatch):
    monkeypatch.setenv("PAGEDVLLM_DEVICE", "cpu")
    monkeypatch.setenv("PAGEDVLLM_MODEL", "/some/where/Tiny-Model")
    teach.setup()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("device: cpu | model: Tiny-Model | pagedvllm ") and "torch" in out


def test_colab_never_replaces_torch(monkeypatch):
    asked = colab.requirements()
    names = {re.split(r"[^\w-]", r)[0] for r in asked}
    assert "transformers" in names and "gguf" in names and not names & {"torch", "triton", "numpy"}
    seen = {}

    class Done:
        returncode, stderr = 0, ""

    def run(command, **options):
        seen["command"], seen["pins"] = command, Path(command[command.index("--constraint") + 1]).read_text()
        return Done

    monkeypatch.setattr(colab.subprocess, "run", run)
    colab.install()
    assert f"torch=={helpers.installed('torch')}\n" in seen["pins"] and "--quiet" in seen["command"]
    Done.returncode, Done.stderr = 1, "no matching distribution"
    with pytest.raises(RuntimeError, match="no matching distribution"):
        colab.install()


def test_all_notebooks_begin_alike():
    paths = list(roadmap.notebooks(ROOT))
    assert paths
    for path in paths:
        first = notebooks.code_cells(notebooks.read(ROOT / path))[0]
        assert first.source == notebooks.FIRST_CELL, path
        assert notebooks.IGNORED in notebooks.tags(first), path
    assert f"url: {notebooks.REPOSITORY}\n" in (ROOT / "_config.yml").read_text()


def test_the_annotated_source(tmp_path):
    from pagedvllm.teach import source

    source.write_pages(tmp_path / "a")
    source.write_pages(tmp_path / "b")
    pages = {p.name: p.read_text() for p in (tmp_path / "a").iterdir()}
    assert pages == {p.name: p.read_text() for p in (tmp_path / "b").iterdir()}
    modules = [m for c in roadmap.read(ROOT) for m in c.modules]
    assert len(pages) == len(modules) + 1
    for module in modules:
        page = pages[source.page_name(module)]
        file = roadmap.module_file(module).read_text()
        assert f"]({source.page_name(module)})" in pages["index.md"]
        missing = [line for line in file.splitlines() if line.strip() and line not in page]
        assert not missing, (module, missing)
        for name in re.findall(r"\]\((pagedvllm-[\w-]+\.md)\)", page):
            assert name in pages
    assert "(../ch01_smallest_example.ipynb#" in pages["pagedvllm-sample-sampler.md"]


def test_source_text_is_safe_markdown():
    from pagedvllm.teach import source

    assert source.escape("a*b `c_d` [e] x.py $1") == r"a\*b `c_d` \[e\] x\.py \$1"
    assert source.fence("x = '''```'''").startswith("````python\n")
    text = '"""Doc."""\n\nA = 1  # one\n\n\n# above\ndef f():\n    pass\n\n\nB = 2\n# end\n'
    codes = [code for _, code in source.blocks(text)]
    assert codes == ['"""Doc."""\n\nA = 1  # one', "# above", "def f():\n    pass", "B = 2", "# end"]
