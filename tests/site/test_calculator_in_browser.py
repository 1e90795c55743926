"""The memory calculator in Chromium: its numbers are Python's, whatever is turned; it can be read, heard and typed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from site_support import ROOT, SHOTS, Reader
from test_browser import LOW_CONTRAST

from pagedvllm import teach
from pagedvllm.sched.limits import GIB
from pagedvllm.teach import roadmap
from pagedvllm.teach.memory_plan import DTYPES, MODELS, PROBLEMS, Plan, needs_of

HOST = "document.querySelector('.pagedvllm-calculator')"
IN_CALCULATOR = LOW_CONTRAST.replace("document.querySelector('main')", f"{HOST}.shadowRoot.querySelector('.frame')")

# What a reader sees, as data.
SEEN = """
(host) => {
  const all = (query) => [...host.shadowRoot.querySelectorAll(query)];
  const values = (query, key) => Object.fromEntries(all(query).map(e => [e.dataset[key], Number(e.dataset.value)]));
  const widths = all('.part').map(e => [e.dataset.part, parseFloat(e.style.width)]);
  return { out: values('dd', 'out'), parts: values('td[data-part]', 'part'), widths: Object.fromEntries(widths),
    problem: host.dataset.problem, status: host.shadowRoot.querySelector('.status').textContent };
}
"""
AMOUNTS = ("non_torch", "cuda_graphs", "used_before")

SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama-3.1-8B", "H100 80 GB", {}),
    ("Llama-3.1-8B", "A100 80 GB", {"gpu_memory_utilization": 0.73, "non_torch": GIB, "used_before": 3 * GIB}),
    ("SmolLM2-135M", "T4 16 GB", {"dtype": "float32", "gpu_memory_utilization": 0.5, "block_size": 8}),
    ("Qwen3-0.6B", "L4 24 GB", {"dtype": "float16", "block_size": 32, "max_model_len": 10, "max_num_seqs": 64}),
    ("Qwen2.5-7B", "RTX 4090 24 GB", {"max_num_batched_tokens": 2048, "max_model_len": 16384, "cuda_graphs": GIB // 2}),
    ("Qwen2.5-14B", "H200 141 GB", {"block_size": 7, "max_num_seqs": 33, "gpu_memory_utilization": 0.57}),
    ("Qwen3-0.6B", "A10 24 GB", {"max_model_len": 40961}),
    ("Qwen3-0.6B", "T4 16 GB", {"max_num_seqs": 64, "max_num_batched_tokens": 32}),
    ("SmolLM2-135M", "T4 16 GB", {"gpu_memory_utilization": 0.99}),
    ("Llama-3.1-70B", "H200 141 GB", {"dtype": "float32", "gpu_memory_utilization": 0.9}),
    ("Qwen2.5-14B", "H100 80 GB", {"gpu_memory_utilization": 0.29}),
    ("Llama-3.1-8B", "RTX 4090 24 GB", {"max_num_seqs": 32, "max_model_len": 100000}),
]


@cache
def needs(model: str, dtype: str) -> Any:
    return needs_of(MODELS[model], DTYPES[dtype])


def plan(model: str, gpu: str, dtype: str = "bfloat16", **settings: Any) -> Plan:
    return teach.plan(model, gpu, needs(model, dtype), dtype=dtype, **settings)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """On a loopback address: a page of its own, and one in each language with two of them on dark ground."""
    from serve import make_server

    folder = tmp_path_factory.mktemp("calculators")
    shown = teach.calculator()
    shown.save(folder / "one.html")
    for lang in ("en", "zh-CN"):
        head = f'<!doctype html><html lang="{lang}" data-theme="dark"><meta charset="utf-8"><meta name="viewport"'
        body = f'content="width=device-width"><body style="background:#14181e">{shown.element()}{shown.element()}'
        (folder / f"two-{lang}.html").write_text(f"{head} {body}</body></html>", "utf-8")
    (folder / "favicon.ico").write_bytes(b"")
    server = make_server(0, folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture
def window(chromium: Any, pages: str) -> Iterator[Any]:
    opened: list[Reader] = []

    def make(name: str = "one", **options: Any) -> Any:
        opened.append(Reader(chromium, pages, **options))
        return opened[-1].open(f"{name}.html")

    yield make
    for reader in opened:
        assert reader.problems == []
        reader.close()


def control(page: Any, name: str) -> Any:
    return page.locator(".pagedvllm-calculator").first.locator(f"#{name}")


def turn(page: Any, model: str, gpu: str, settings: dict[str, Any]) -> None:
    """Choose all that a plan's settings say, as a reader would."""
    control(page, "model").select_option(model)
    control(page, "gpu").select_option(gpu)
    control(page, "dtype").select_option(settings["dtype"])
    for name, value in settings.items():
        if name != "dtype":
            control(page, name).fill(str(value / GIB if name in AMOUNTS else value))


def test_the_page_computes_what_python_does(window: Any) -> None:
    """Every part, every result and every refusal, for a dozen settings that are reached one from the other."""
    page = window()
    host = page.locator(".pagedvllm-calculator")
    found = []
    for model, gpu, changes in SETTINGS:
        p = plan(model, gpu, **{"non_torch": GIB // 8, **changes})
        turn(page, model, gpu, asdict(p.settings))
        seen = host.evaluate(SEEN)
        assert seen["problem"] == p.problem
        found.append(p.problem)
        names = ("num_blocks", "usable_tokens", "concurrency", "page_bytes")
        assert {name: seen["out"][name] for name in names} == {name: getattr(p, name) for name in names}
        assert seen["out"]["per_request"] == p.blocks_per_request
        assert seen["out"]["token_bytes"] * p.settings.block_size == p.page_bytes
        parts = {name: getattr(p, name) for name in ("weights", "activations", "kv_cache", "unused")}
        parts |= {name: getattr(p.settings, name) for name in AMOUNTS}
        assert seen["parts"] == parts
        assert sum(seen["widths"].values()) == pytest.approx(100)
        if p.unused > 0:
            assert seen["widths"] == pytest.approx({k: 100 * v / p.total for k, v in parts.items() if v}, abs=0.001)
        assert f"{p.num_blocks:,} blocks" in seen["status"] or p.problem
    assert set(found) == {"", *PROBLEMS}


@pytest.mark.parametrize("first", [0, 33, 66])
def test_every_utilisation(window: Any, first: int) -> None:
    """ceil(total * share) is computed in doubles on both sides; the slider goes with the arrow keys."""
    page = window()
    slider = control(page, "gpu_memory_utilization")
    slider.fill(str(first / 100))
    slider.focus()
    host = page.locator(".pagedvllm-calculator")
    for share in range(first, first + 34):
        seen = host.evaluate(SEEN)
        assert slider.input_value() == f"{share / 100:g}"
        p = plan("Llama-3.1-8B", "H100 80 GB", gpu_memory_utilization=share / 100)
        assert (seen["out"]["num_blocks"], seen["problem"]) == (p.num_blocks, p.problem)
        page.keyboard.press("ArrowRight")


def test_what_the_messages_advise_works(window: Any) -> None:
    page = window()
    status = page.get_by_role("status")
    turn(page, "Llama-3.1-8B", "RTX 4090 24 GB", asdict(plan("Llama-3.1-8B", "RTX 4090 24 GB").settings))
    control(page, "max_num_seqs").fill("32")
    assert status.inner_text().startswith("It does not start: a request of max_model_len 131,072 needs 8,192 blocks")
    most = status.inner_text().rstrip(".").rsplit(" ", 1)[1].replace(",", "")
    control(page, "max_model_len").fill(most)
    assert status.inner_text().startswith("It starts: ")
    control(page, "gpu_memory_utilization").fill("1")
    assert "asks for 23.64 GiB. Free 0.50 GiB or set at most 0.97." in status.inner_text()
    control(page, "gpu_memory_utilization").fill("0.97")
    assert status.inner_text().startswith("It starts: ")
    control(page, "model").select_option("Llama-3.1-70B")
    assert status.inner_text().startswith("The weights do not fit: they need 131.44 GiB, 23.14 GiB are free.")
    assert page.locator(".mark.end").count() == 1
    control(page, "model").select_option("Qwen3-0.6B")
    assert "but max_num_seqs admits 32" not in status.inner_text()
    control(page, "max_model_len").fill("1000")
    assert "but max_num_seqs admits 32" in status.inner_text()


def test_a_new_model_or_gpu_brings_its_defaults(window: Any) -> None:
    page = window()
    control(page, "gpu").select_option("T4 16 GB")
    control(page, "model").select_option("SmolLM2-135M")
    values = [control(page, f"max_{n}").input_value() for n in ("num_seqs", "num_batched_tokens", "model_len")]
    assert values == ["256", "8192", "8192"]
    control(page, "max_num_seqs").fill("100")
    control(page, "gpu").select_option("H200 141 GB")
    control(page, "model").select_option("Llama-3.1-8B")
    values = [control(page, f"max_{n}").input_value() for n in ("num_seqs", "num_batched_tokens", "model_len")]
    assert values == ["100", "16384", "8192"], "what was typed stays"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", "", "block_size must be a whole number from 1 to 4,096."),
        ("block_size", "0", "block_size must be a whole number"),
        ("max_num_seqs", "2.5", "max_num_seqs must be a whole number"),
        ("max_model_len", "99999999", "max_model_len must be a whole number from 1 to 16,777,216."),
        ("non_torch", "-1", "non-torch memory must be a number of GiB from 0 to 1000."),
    ],
)
def test_a_value_that_cannot_be(window: Any, name: str, value: str, message: str) -> None:
    """It is named, nothing breaks, and the results stay those of the last values that could be."""
    page = window()
    host = page.locator(".pagedvllm-calculator")
    before = host.evaluate(SEEN)
    control(page, name).fill(value)
    seen = host.evaluate(SEEN)
    assert seen["status"].startswith(message)
    assert control(page, name).get_attribute("aria-invalid") == "true"
    assert (seen["out"], seen["parts"], seen["problem"]) == (before["out"], before["parts"], "input")
    control(page, name).fill("16")
    assert control(page, name).get_attribute("aria-invalid") == "false"


def test_keyboard_alone(window: Any) -> None:
    """Tab comes to every control in reading order, each with a name and a visible outline; Jupyter gets no key."""
    page = window()
    page.evaluate("document.addEventListener('keydown', e => { window.leaked = (window.leaked ?? '') + e.key })")
    named = (
        f"() => {{ const e = {HOST}.shadowRoot.activeElement; return e && [e.localName, e.labels?.[0]?.textContent,"
        + (" parseFloat(getComputedStyle(e).outlineWidth)] }")
    )
    stops = []
    for _ in range(20):
        page.keyboard.press("Tab")
        if (now := page.evaluate(named)) is None:
            break
        stops.append(now)
        page.keyboard.press("ArrowDown") if now[0] == "input" else None
    labels = ["Model", "GPU", "dtype", "gpu_memory_utilization 0.92", "block_size", "max_model_len", "max_num_seqs"]
    labels += ["max_num_batched_tokens", "non-torch memory, GiB", "CUDA graphs, GiB", "in use before the start, GiB"]
    assert [label for _, label, _ in stops] == [*labels, None]
    assert all(width >= 2 for _, _, width in stops)
    assert stops[-1][0] == "summary"
    assert control(page, "block_size").input_value() == "15"
    assert "Arrow" not in (page.evaluate("window.leaked") or "")
    tree = page.locator(".pagedvllm-calculator").aria_snapshot()
    assert 'slider "gpu_memory_utilization' in tree and 'combobox "Model"' in tree and "status" in tree
    label = page.locator(".bar").get_attribute("aria-label")
    assert label.startswith("weights 1") and label.endswith("the card has 79.18 GiB")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("case", [0, 4, 8, 9], ids=lambda case: SETTINGS[case][0])
def test_legible_and_within_a_phone(window: Any, case: int, theme: str) -> None:
    page = window()
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    page.wait_for_selector(f".pagedvllm-calculator[data-look={theme}]")
    model, gpu, changes = SETTINGS[case]
    turn(page, model, gpu, asdict(plan(model, gpu, **changes).settings))
    page.locator("summary").click()
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width in (1000, 390):
        page.set_viewport_size({"width": width, "height": 844})
        contrast = page.evaluate(IN_CALCULATOR)
        assert contrast["seen"] > 30
        assert contrast["bad"] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=str(SHOTS / f"calculator-{case}-{theme}-{width}.png"), full_page=True)


def test_several_on_one_page(window: Any) -> None:
    page = window("two-en")
    hosts = page.locator(".pagedvllm-calculator[data-look=dark]")
    assert hosts.count() == 2
    before = hosts.nth(1).evaluate(SEEN)
    hosts.nth(0).locator("#block_size").fill("64")
    assert hosts.nth(0).evaluate(SEEN)["out"] != before["out"] == hosts.nth(1).evaluate(SEEN)["out"]


def test_chinese(window: Any) -> None:
    page = window("two-zh-CN")
    host = page.locator(".pagedvllm-calculator").first
    texts = []
    for model, gpu, changes in SETTINGS:
        turn(page, model, gpu, asdict(plan(model, gpu, **changes).settings))
        texts.append(host.evaluate("e => e.shadowRoot.querySelector('.frame').innerText"))
    control(page, "block_size").fill("")
    texts.append(host.evaluate("e => e.shadowRoot.querySelector('.frame').innerText"))
    assert "block_size 必须是 1 到 4,096 之间的整数。" in texts[-1]
    assert "可以启动：" in texts[0] and "权重放不下：" in texts[9]
    assert not any(word in text for text in texts for word in ("undefined", "NaN", "does not", "must be"))


def test_without_scripts_the_summary_is_read(chromium: Any, pages: str) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{pages}one.html")
    assert "blocks of 16 tokens" in page.locator(".pagedvllm-calculator p").inner_text()
    context.close()


def notebooks_with_calculators() -> dict[str, int]:
    """Page -> how many calculators its notebook holds."""
    found = {}
    for path in roadmap.notebooks(ROOT):
        if (file := ROOT / path).exists():
            count = file.read_text("utf-8").count('class=\\"pagedvllm-calculator\\"')
            found |= {path.removesuffix(".ipynb"): count} if count else {}
    return found


@pytest.mark.parametrize("edition", ["", "zh/"])
def test_calculators_of_the_built_site(reader: Any, edition: str) -> None:
    for name, count in notebooks_with_calculators().items():
        for theme in ("light", "dark"):
            window = reader(theme=theme)
            page = window.open(f"{edition}{name}.html")
            hosts = page.locator(f".pagedvllm-calculator[data-look={theme}]")
            assert hosts.count() == count
            before = hosts.first.evaluate(SEEN)
            hosts.first.locator("#gpu_memory_utilization").fill("0.81")
            assert hosts.first.evaluate(SEEN)["out"] != before["out"]
            assert page.evaluate(IN_CALCULATOR)["bad"] == []
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert window.problems == []
