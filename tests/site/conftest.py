"""The built site, a server for it, and Chromium.

Without Chromium the browser tests report "not run: no Chromium", each by name; PAGEDVLLM_REQUIRE_BROWSER=1 makes that a
failure. Without a built site everything here fails: the tests are about the site.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_support import FLAGS, SITE, Reader, find_chromium


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "zh/llms.txt").exists():
        pytest.fail("there is no built site in _build/html: run `make book`")
    return SITE


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    from serve import make_server

    server = make_server(0, site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = find_chromium()
    if path is None:
        if os.environ.get("PAGEDVLLM_REQUIRE_BROWSER") == "1":
            pytest.fail("PAGEDVLLM_REQUIRE_BROWSER=1 and there is no Chromium")
        pytest.skip("not run: no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def reader(chromium: Any, address: str) -> Iterator[Any]:
    """Makes windows: reader(theme="dark", width=390)."""
    windows: list[Reader] = []

    def make(**options: Any) -> Reader:
        windows.append(Reader(chromium, address, **options))
        return windows[-1]

    yield make
    for window in windows:
        window.close()
