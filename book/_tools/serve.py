"""Serve _build/html on this machine alone. Usage: serve.py [--port 8000]"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "_build/html"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Quiet, and sure that .mjs is JavaScript: browsers refuse a module with another type."""

    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

    def log_message(self, format: str, *args: object) -> None:
        """Requests are of no interest to a reader."""

    def handle(self) -> None:
        """A browser that goes to another page hangs up: no news either."""
        with contextlib.suppress(ConnectionError):
            super().handle()


def make_server(port: int, site: Path = SITE) -> http.server.ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(site)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the built site on this machine alone.")
    parser.add_argument("--port", type=int, default=8000)
    wanted = parser.parse_args().port
    try:
        server = make_server(wanted)
    except OSError:
        server = make_server(0)
        print(f"port {wanted} is taken, using another")
    print(f"http://127.0.0.1:{server.server_address[1]}/   (中文版 /zh/)   Ctrl-C stops", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
