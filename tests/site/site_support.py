"""Where the built site is, which pages it has, and a browser window that notes what goes wrong in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build/html"
SHOTS = ROOT / "_build/shots"
sys.path += [str(ROOT / "book/_tools"), str(ROOT / "book/_ext")]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def site_pages(edition: str) -> list[str]:
    """The names of an edition's pages in the order of its llms.txt; edition is "" or "zh/"."""
    index = SITE / edition / "llms.txt"
    if not index.exists():
        return []
    lines = index.read_text("utf-8").splitlines()
    return [line.split("](", 1)[1].split(".html)", 1)[0] for line in lines if line.startswith("- [")]


def one_of_each(pages: list[str]) -> list[str]:
    """All written pages, and of the generated source pages the index and the first."""
    source = [name for name in pages if name.startswith("book/source/")]
    return [name for name in pages if name not in source] + source[:2]


def find_chromium() -> str | None:
    names = [os.environ.get("PAGEDVLLM_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Reader:
    """One browser window, and everything that went wrong in it."""

    def __init__(self, browser: Any, address: str, theme: str = "light", width: int = 1300) -> None:
        self.address, self.problems = address, []  # type: tuple[str, list[str]]
        self.context = browser.new_context(
            viewport={"width": width, "height": 900 if width > 600 else 844},
            reduced_motion="reduce",  # pictures are taken at rest
        )
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        mode = json.dumps(theme)
        self.context.add_init_script(f"localStorage.setItem('mode', {mode}); localStorage.setItem('theme', {mode});")
        self.page = self.context.new_page()
        self.page.on("request", self._request)
        self.page.on("response", self._response)
        self.page.on("requestfailed", self._failed)
        self.page.on("pageerror", lambda e: self.problems.append(f"script error: {e}"))
        self.page.on("console", self._console)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"left this machine: {request.url}")

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # else it was the window itself, which left the page meanwhile
            self.problems.append(f"request failed: {request.url}: {request.failure}")

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text}")

    def open(self, name: str) -> Any:
        """Open a page ("zh/book/index.html") and wait until its formulas and diagrams are drawn."""
        self.page.goto(self.address + name, wait_until="load")
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.math')].every(m => m.querySelector('mjx-container'))"
            " && [...document.querySelectorAll('pre.mermaid')].every(m => m.querySelector('svg[viewBox]'))",
            timeout=15000,
        )
        return self.page

    def close(self) -> None:
        self.context.close()
