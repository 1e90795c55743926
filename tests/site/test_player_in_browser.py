"""The trace player in Chromium: on a page of its own, and in the chapters that hold one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_support import ROOT, SHOTS, SITE, Reader
from test_browser import LOW_CONTRAST

from pagedvllm import teach
from pagedvllm.replay import replay
from pagedvllm.teach import roadmap
from pagedvllm.workload import load

GOLDEN = ROOT / "tests/golden"
EVIL = "<b onclick=alert(1)>&lt;"
LEGIBLE = LOW_CONTRAST.replace("document.querySelector('main')", "ROOT")
IN_PLAYER = LEGIBLE.replace("ROOT", "document.querySelector('.pagedvllm-player').shadowRoot.querySelector('.frame')")

# What a reader sees of one step, as data.
SEEN = """
(host) => {
  const all = (query) => [...host.shadowRoot.querySelectorAll(query)];
  const queues = all('.queue ol').map(ol => [...ol.querySelectorAll('.chip .id')].map(e => e.textContent));
  const rows = all('tbody tr').map(tr => [tr.querySelector('.id').textContent, tr.querySelector('.num').textContent,
    [...tr.querySelectorAll('.entry')].map(e => Number(e.textContent))]);
  const cells = all('.cell:not(.null)').map(e => [Number(e.dataset.block), JSON.parse(e.dataset.owners),
    Number(e.dataset.refs ?? 1), e.classList.contains('cached')]);
  return { queues, rows, cells, free: all('.title b').map(e => e.textContent).at(-1),
    used: all('.budget b')[0].textContent, taken: all('.lost').map(e => Number(e.textContent)) };
}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Pages of players on a loopback address: one for each workload shown, one with three, one with an evil name."""
    from serve import make_server

    folder = tmp_path_factory.mktemp("players")
    elements = []
    for name in ("w02_kv_pressure_fcfs", "w04_prefix_sharing", "w13_stop_abort_length"):
        workload = load(GOLDEN / f"{name}.workload.json")
        shown = teach.player(replay(workload), workload.engine, title=name)
        shown.save(folder / f"{name}.html")
        elements.append(shown.element())
    workload = load(GOLDEN / "n08_priority_preempt.workload.json")
    teach.player(replay(workload, "counting"), workload.engine).save(folder / "counting.html")
    three = "\n".join([*elements[:2], elements[0]])
    for lang in ("en", "zh-CN"):
        head = f'<!doctype html><html lang="{lang}" data-theme="dark"><meta charset="utf-8"><meta name="viewport"'
        page = f'{head} content="width=device-width"><body style="background:#14181e">{three}</body></html>'
        (folder / f"three-{lang}.html").write_text(page, "utf-8")
    step = {"step": 0, "arrived": [EVIL], "scheduled": {EVIL: 3}, "new": [EVIL], "running_queue": [EVIL]}
    teach.player([{**step, "blocks": {EVIL: [1, 2]}, "free_after_schedule": 5}], title=EVIL).save(folder / "evil.html")
    (folder / "favicon.ico").write_bytes(b"")
    server = make_server(0, folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture
def window(chromium: Any, pages: str) -> Iterator[Any]:
    opened: list[Reader] = []

    def make(name: str, **options: Any) -> Any:
        opened.append(Reader(chromium, pages, **options))
        return opened[-1].open(f"{name}.html")

    yield make
    for reader in opened:
        assert reader.problems == []
        reader.close()


def golden(name: str) -> list[dict[str, Any]]:
    text = (GOLDEN / f"{name}.trace.jsonl").read_text("utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "end" not in line]


@pytest.mark.parametrize("name", ["w02_kv_pressure_fcfs", "w04_prefix_sharing", "w13_stop_abort_length"])
def test_every_step_shows_what_was_recorded(window: Any, name: str) -> None:
    """Both moments of each step, against vLLM's own trace."""
    page, lines, preempted, shared = window(name), golden(name), 0, 0
    budget = load(GOLDEN / f"{name}.workload.json").engine.max_num_batched_tokens
    host = page.locator(".pagedvllm-player")
    page.get_by_role("slider").focus()
    for line in lines:
        page.keyboard.press("u")
        after = host.evaluate(SEEN)
        page.keyboard.press("u")
        seen = host.evaluate(SEEN)
        page.keyboard.press("n")
        if line.get("idle"):
            continue
        assert seen["queues"] == [line["running_queue"], line["waiting_queue"]]
        assert {row[0]: row[2] for row in seen["rows"] if row[2]} == line["blocks"]
        assert {row[0]: int(row[1]) for row in seen["rows"] if row[1]} == line["scheduled"]
        assert seen["free"].startswith(f"{line['free_after_schedule']} of ")
        assert seen["used"] == f"{line['total']} of {budget} tokens"
        assert bool(seen["taken"]) == bool(line["preempted"])
        owners = {block: sorted(who) for block, who, _, _ in seen["cells"] if who}
        held = {block for table in line["blocks"].values() for block in table}
        assert owners == {b: sorted(name for name, table in line["blocks"].items() if b in table) for b in held}
        assert after["free"].startswith(f"{line['free_after_update']} of ")
        counts = {block: count for block, _, count, _ in after["cells"] if count > 1}
        assert counts == {int(block): count for block, count in line["ref_cnt"].items() if count > 1}
        assert [block for block, _, _, cached in after["cells"] if cached] == line["cached_blocks"]
        assert after["queues"][0] == [r for r in line["running_queue"] if r not in line["finished"]]
        preempted += len(line["preempted"])
        shared += len(counts)
    assert preempted >= 5 or name != "w02_kv_pressure_fcfs"
    assert shared >= 10 or name != "w04_prefix_sharing"


@pytest.mark.parametrize("name", ["w02_kv_pressure_fcfs", "w13_stop_abort_length"])
def test_timeline_shows_what_was_recorded(window: Any, name: str) -> None:
    page = window(name)
    page.get_by_role("tab", name="Timeline").click()
    seen: dict[tuple[int, str], str] = {}
    while True:
        cells = page.locator(".timeline tbody td[data-key]")
        part = cells.evaluate_all("all => all.map(e => [Number(e.dataset.at), e.dataset.owner, e.textContent])")
        seen |= {(at, owner): text for at, owner, text in part}
        before = page.get_by_role("slider").input_value()
        for _ in range(6):
            page.keyboard.press("PageDown") if before != "0" else page.get_by_role("slider").press("PageDown")
        if page.get_by_role("slider").input_value() == before:
            break
    expected = {}
    for at, line in enumerate(golden(name)):
        expected |= {(at, owner): "·" for owner in line.get("waiting_queue", ())}
        expected |= {(at, owner): "×" for owner in line.get("preempted", ())}
        expected |= {(at, owner): str(n) for owner, n in line.get("scheduled", {}).items()}
        expected |= {(at, owner): "a" for owner in line.get("aborted", ())}
    assert seen == expected
    assert {"×"} < set(seen.values()) if name.startswith("w02") else {"a"} < set(seen.values())


def test_keyboard_alone(window: Any) -> None:
    """Tab comes to every control and once to each group; arrows move in it; focus survives a step."""
    page = window("w04_prefix_sharing")
    focused = "() => { const e = document.querySelector('.pagedvllm-player').shadowRoot.activeElement;" + (
        " return e && [e.dataset.group ?? e.getAttribute('role') ?? e.type, e.getAttribute('aria-label') ?? ''] }"
    )
    stops = []
    for _ in range(20):
        page.keyboard.press("Tab")
        if (now := page.evaluate(focused)) is None:
            break
        stops.append(now)
        width = "e => parseFloat(getComputedStyle(e.shadowRoot.activeElement).outlineWidth)"
        assert page.locator(".pagedvllm-player").evaluate(width) >= 2
    assert [kind for kind, _ in stops] == ["tab", *["button"] * 5, "range", *["button"] * 2, "tables", "pool"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused)[1].startswith("block 2; held by sys_a (entry 1), dup_same_step1 (entry 1)")
    assert page.locator(".detail").inner_text() == page.evaluate(focused)[1]
    assert page.locator(".entry.hot").count() == 2
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert page.evaluate(focused)[1].endswith("3 references; found by its prefix")
    page.keyboard.press("t")
    assert page.get_by_role("tab", name="Timeline").get_attribute("aria-selected") == "true"
    page.locator(".timeline [tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused)[1].startswith("step 3 (4/19); dup_same_step1: 1 token in this step")
    page.keyboard.press("n")
    assert page.evaluate(focused)[1].startswith("step 4 (5/19); dup_same_step1")
    page.keyboard.press("Enter")
    assert page.get_by_role("tabpanel").get_attribute("aria-labelledby") == "tab-step"
    assert page.locator(".where").inner_text() == "step 4 (5/19)"
    page.keyboard.press("End")
    page.keyboard.press("n")
    assert page.locator(".where").inner_text() == "step 18 (19/19)"


def test_pointing_lights_up_both_sides(window: Any) -> None:
    page = window("w02_kv_pressure_fcfs")
    page.locator(".cell").nth(7).hover()
    assert page.locator(".detail").inner_text() == "block 7; held by r02 (entry 2); 1 reference"
    assert page.locator(".entry.hot").all_inner_texts() == ["7"]
    page.locator(".name").nth(3).hover()
    assert page.locator(".cell.hot").all_inner_texts() == ["8", "9", "10", "11"]
    assert "prompt of 14 tokens" in page.locator(".detail").inner_text()
    page.get_by_role("tab", name="Timeline").click()
    page.locator(".t.pre").first.hover()
    assert "preempted" in page.locator(".detail").inner_text()
    page.locator(".t.pre").first.click()
    assert page.locator(".events").inner_text().startswith("r06 preempted")
    assert page.locator(".events").get_attribute("role") == "status"


def test_play_runs_to_the_end_and_stops(window: Any) -> None:
    page = window("w04_prefix_sharing")
    page.get_by_role("slider").focus()
    page.keyboard.press("End")
    page.keyboard.press("p")
    page.get_by_role("button", name="Play").click()
    assert page.locator(".events").get_attribute("aria-live") == "off"
    page.get_by_role("button", name="Play").wait_for(timeout=5000)
    assert page.locator(".where").inner_text() == "step 18 (19/19)"
    assert page.locator(".events").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["step", "timeline"])
@pytest.mark.parametrize("name", ["w02_kv_pressure_fcfs", "w04_prefix_sharing", "counting"])
def test_legible_and_within_a_phone(window: Any, name: str, view: str, theme: str) -> None:
    page = window(name)
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    page.wait_for_selector(f".pagedvllm-player[data-look={theme}]")
    page.get_by_role("slider").focus()
    if view == "timeline":
        page.keyboard.press("t")
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width in (1000, 390):
        page.set_viewport_size({"width": width, "height": 844})
        for _ in range(6):
            page.keyboard.press("n")
            contrast = page.evaluate(IN_PLAYER)
            assert contrast["seen"] > 20
            assert contrast["bad"] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=str(SHOTS / f"player-{name}-{view}-{theme}-{width}.png"), full_page=True)


def test_system_theme(window: Any) -> None:
    page = window("w04_prefix_sharing")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f".pagedvllm-player[data-look={scheme}]")


def test_several_on_one_page(window: Any) -> None:
    """Each has its own state, and ids that collide with nobody's."""
    page = window("three-en")
    hosts = page.locator(".pagedvllm-player[data-look=dark]")
    assert hosts.count() == 3
    hosts.nth(2).get_by_role("button", name="Next step").click()
    wheres = [hosts.nth(i).locator(".where").inner_text() for i in range(3)]
    assert wheres == ["step 0 (1/50)", "step 0 (1/19)", "step 1 (2/50)"]


def test_chinese(window: Any) -> None:
    page = window("three-zh-CN")
    host = page.locator(".pagedvllm-player").first
    for view in ("单步", "时间线"):
        host.get_by_role("tab", name=view).click()
        for _ in range(12):
            host.get_by_role("button", name="下一步").click()
            text = host.evaluate("e => e.shadowRoot.querySelector('.frame').innerText")
            assert "undefined" not in text
    assert "被抢占" in host.evaluate("e => e.shadowRoot.querySelector('.frame').innerText")


def test_names_are_text(window: Any) -> None:
    page = window("evil")
    host = page.locator(".pagedvllm-player")
    assert host.locator(".chip .id").inner_text() == EVIL
    page.get_by_role("tab", name="Timeline").click()
    assert host.evaluate("e => e.shadowRoot.querySelectorAll('b[onclick]').length") == 0


def test_without_scripts_the_summary_is_read(chromium: Any, pages: str) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{pages}w02_kv_pressure_fcfs.html")
    assert "7 preemptions" in page.locator(".pagedvllm-player p").inner_text()
    context.close()


def notebooks_with_players() -> dict[str, int]:
    """Page -> how many players its notebook holds."""
    found = {}
    for path in roadmap.notebooks(ROOT):
        count = (ROOT / path).read_text("utf-8").count('class=\\"pagedvllm-player\\"')
        if count:
            found[path.removesuffix(".ipynb")] = count
    return found


def test_chapters_3_and_4_hold_one() -> None:
    stand = {path.removesuffix(".ipynb"): chapter.id for path, chapter in roadmap.notebooks(ROOT).items()}
    wanted = {page for page, number in stand.items() if number in ("3", "4") and page.startswith("book/")}
    assert wanted <= set(notebooks_with_players())


@pytest.mark.parametrize("edition", ["", "zh/"])
def test_players_of_the_built_site(reader: Any, edition: str) -> None:
    for name, count in notebooks_with_players().items():
        assert (Path(SITE) / f"{edition}{name}.html").exists()
        for theme in ("light", "dark"):
            window = reader(theme=theme)
            page = window.open(f"{edition}{name}.html")
            hosts = page.locator(f".pagedvllm-player[data-look={theme}]")
            assert hosts.count() == count
            host = hosts.first
            host.scroll_into_view_if_needed()
            host.get_by_role("slider").focus()
            page.keyboard.press("n")
            assert "2/" in host.locator(".where").inner_text()
            assert page.evaluate(IN_PLAYER)["bad"] == []
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert window.problems == []
