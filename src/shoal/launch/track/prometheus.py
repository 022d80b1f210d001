"""The last step's numbers in Prometheus' text format, served by the launcher."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoal.launch.track.tracker import values_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(run: str, row: Mapping[str, Any] | None, seen: float) -> str:
    """One gauge per number of a row; ``seen``: when the row arrived, in seconds since 1970."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    known = {"up": 1.0}
    if row is not None:
        known |= {"step": float(row["step"]), "last_step_timestamp_seconds": seen, **values_of(row)}
    lines = []
    for name, value in known.items():
        metric = "shoal_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{label}"}} {value!r}']
    return "\n".join(lines) + "\n"


class Endpoint:
    """``http://ADDRESS:PORT/metrics``, in a thread; serves only what it was given."""

    def __init__(self, run: str, address: str, port: int) -> None:
        """Raises OSError if the port is taken."""
        self.run = run
        self._last: tuple[Mapping[str, Any] | None, float] = (None, 0.0)
        endpoint = self

        class Answer(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = exposition(endpoint.run, *endpoint._last).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Silent: a scrape every few seconds is not worth a line."""

        self._server = ThreadingHTTPServer((address, port), Answer)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="shoal-prometheus", daemon=True).start()

    def tell(self, row: Mapping[str, Any]) -> None:
        self._last = (row, time.time())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
