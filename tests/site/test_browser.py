"""The site as a reader meets it, in Chromium."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from site_support import SHOTS, one_of_each, site_pages

CHAPTER = "book/ch01_smallest_example"
PAGES = [edition + name for edition in ("", "zh/") for name in one_of_each(site_pages(edition))]

# Every visible piece of text in the page's main part, with the contrast to the background that is painted behind it.
LOW_CONTRAST = """
() => {
  const parse = (text) => {
    const v = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith('color(srgb') ? 255 : 1;
    return [v[0] * scale, v[1] * scale, v[2] * scale, v[3] ?? 1];
  };
  const light = (c) => {
    const f = c.slice(0, 3).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const shape = e.classList.contains('node') && e.querySelector('rect, polygon, path');  // a mermaid box
      const c = parse(shape ? getComputedStyle(shape).fill : getComputedStyle(e).backgroundColor);
      if (c[3] > 0) layers.push(c);
      if (c[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const bad = [];
  const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || element.closest('script, style, mjx-assistive-mml, .sr-only, .visually-hidden')) continue;
    const style = getComputedStyle(element);
    if (!element.getClientRects().length || style.visibility !== 'visible' || style.opacity === '0') continue;
    seen += 1;
    const back = behind(element);
    const a = light(over(parse(style.color), back)), b = light(back);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return { seen, bad };
}
"""


def test_there_are_pages(site: Any) -> None:
    assert len(PAGES) >= 20


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page(reader: Any, name: str, theme: str) -> None:
    """Nothing leaves this machine, nothing fails, all is drawn, all text is legible, nothing scrolls sideways."""
    window = reader(theme=theme)
    page = window.open(name + ".html")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.locator("mjx-merror, .mermaid .error-icon").count() == 0
    assert page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)") == []
    assert page.locator("main img:not([alt]), main img[alt='']").count() == 0
    contrast = page.evaluate(LOW_CONTRAST)
    assert contrast["seen"] > 3
    assert contrast["bad"] == []
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name.replace('/', '_')}-{theme}-wide.png"))
    page.set_viewport_size({"width": 390, "height": 844})
    # Try to move the page: overflow that is merely clipped cannot be seen by anyone, so it must not be there either.
    page.evaluate("window.scrollTo(1000, 0)")
    assert page.evaluate("window.scrollX") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=str(SHOTS / f"{name.replace('/', '_')}-{theme}-phone.png"), full_page=True)
    assert window.problems == []


def test_source_pages_fit_a_phone(reader: Any) -> None:
    """All of the generated pages, of which test_page opens two: their titles and lines are of any length."""
    window = reader(width=390)
    wide = []
    for name in [name for name in site_pages("") if name.startswith("book/source/")]:
        window.page.goto(f"{window.address}{name}.html")
        window.page.evaluate("window.scrollTo(1000, 0)")
        if window.page.evaluate("window.scrollX") != 0:
            wide.append(name)
    assert wide == []
    assert window.problems == []


def test_legibility_check_can_fail(reader: Any) -> None:
    page = reader().open("book/index.html")
    page.add_style_tag(content="main p { color: #ccc !important; }")
    assert page.evaluate(LOW_CONTRAST)["bad"] != []


def test_a_request_that_leaves_is_noticed(reader: Any) -> None:
    window = reader()
    page = window.open("book/index.html")
    page.evaluate("fetch('http://pagedvllm.invalid/').catch(() => 0)")
    page.wait_for_timeout(300)
    assert any("left this machine" in problem for problem in window.problems)


def test_formulas_and_diagrams_are_drawn(reader: Any) -> None:
    window = reader()
    assert window.open("book/roadmap.html").locator("pre.mermaid svg .node").count() >= 9
    assert window.open(f"{CHAPTER}.html").locator("mjx-container svg").count() >= 1
    assert window.problems == []


@pytest.mark.parametrize(
    ("edition", "query", "expected"),
    [
        ("", "preemption", "glossary"),
        ("", "chunked prefill", "glossary"),
        ("zh/", "抢占", "glossary"),
        ("zh/", "调度器", "glossary"),
        ("zh/", "KV cache 块", "checklist"),
        ("zh/", "PagedAttention", "bibliography"),
    ],
)
def test_search_finds(reader: Any, edition: str, query: str, expected: str) -> None:
    window = reader()
    page = window.open(f"{edition}search.html?q={quote(query)}")
    page.wait_for_selector("#search-results ul.search li a", timeout=10000)
    page.wait_for_function("() => !/\\.\\.\\.$/.test(document.querySelector('#search-results h2')?.textContent || '')")
    links = page.eval_on_selector_all("#search-results ul.search li a", "all => all.map(a => a.href)")
    assert any(f"/{edition}book/{expected}.html" in link for link in links), links
    assert window.problems == []


@pytest.mark.parametrize("edition", ["", "zh/"])
def test_search_finds_nothing_for_nonsense(reader: Any, edition: str) -> None:
    page = reader().open(f"{edition}search.html?q={quote('麒麟zzqx')}")
    page.wait_for_timeout(1500)
    assert page.locator("#search-results ul.search li").count() == 0


@pytest.mark.parametrize("name", one_of_each(site_pages("")))
def test_switcher_keeps_the_page(reader: Any, address: str, name: str) -> None:
    window = reader()
    page = window.open(f"{name}.html")
    page.locator(".language-switch").click()
    page.wait_for_load_state()
    assert page.url == f"{address}zh/{name}.html"
    assert page.evaluate("document.documentElement.lang").startswith("zh")
    page.locator(".language-switch").click()
    page.wait_for_load_state()
    assert page.url == f"{address}{name}.html"
    assert window.problems == []


def test_switcher_fits_a_phone(reader: Any) -> None:
    assert reader(width=390).open(f"zh/{CHAPTER}.html").locator(".language-switch").is_visible()


@pytest.mark.parametrize("edition", ["", "zh/"])
def test_notebook_buttons(reader: Any, edition: str) -> None:
    """The copy button copies the cell, the download is the notebook, Colab's address names it."""
    window = reader()
    page = window.open(f"{edition}{CHAPTER}.html")
    cell = page.locator("div.cell_input").first
    cell.hover()
    cell.locator("button.copybtn").click()
    page.wait_for_timeout(200)
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == cell.locator("pre").inner_text().strip()
    assert page.locator("div.cell_output button.copybtn").count() == 0
    colab = f"https://colab.research.google.com/github/pagedvllm/pagedvllm/blob/main/{CHAPTER}.ipynb"
    assert page.locator(f'a[href="{colab}"]').count() == 1
    source = page.locator("a.btn-download-source-button").first.get_attribute("href")
    response = page.request.get(page.evaluate("h => new URL(h, location).href", source))
    assert json.loads(response.text())["nbformat"] == 4
    assert window.problems == []


def test_theme_button_switches(reader: Any) -> None:
    page = reader(theme="light").open("book/index.html")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for _ in range(3):  # the button goes round: auto, light, dark
        page.locator("button.theme-switch-button").first.click()
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("edition", ["", "zh/"])
def test_root_leads_to_the_landing_page(reader: Any, address: str, edition: str) -> None:
    page = reader().page
    page.goto(f"{address}{edition}")
    page.wait_for_url(f"{address}{edition}book/index.html")
    assert page.locator("pre", has_text="make book").count() == 1
