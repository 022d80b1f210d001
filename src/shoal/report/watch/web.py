"""The live view as a page: a small server on loopback, which serves what the run's files say and changes nothing.

Only this machine can open it; bound to any other address, it requires a token. A page of another site could make a
browser send requests under that site's name (DNS rebinding): on loopback, only requests to a loopback name are
answered.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from urllib.parse import parse_qs, urlsplit

from shoal.facts.problem import BadInput
from shoal.report.page import embedded
from shoal.report.watch.follow import MOST_RANKS, RunFollower
from shoal.report.watch.snapshot import snapshot
from shoal.report.watch.web_page import web_page

COOKIE = "shoal_token"
# A request that is not complete by then is dropped.
PATIENCE_SECONDS = 20.0
NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


class WatchServer(ThreadingHTTPServer):
    """Use it as a context: requests are answered in threads; ``address`` is the URL to open."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, follower: RunFollower, host: str = "127.0.0.1", port: int = 0) -> None:
        self.follower = follower
        self.loopback = is_loopback(host)
        self.token = "" if self.loopback else secrets.token_urlsafe(24)
        self.host = host
        self._looking = threading.Lock()
        if ":" in host:
            self.address_family = AF_INET6
        try:
            super().__init__((host, port), WatchHandler)
        except (OSError, OverflowError) as error:
            what = getattr(error, "strerror", None) or str(error)
            raise BadInput(
                f"cannot listen on {host} port {port}: {what}", "--port 0 takes a free one"
            ) from None

    @property
    def address(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?token={self.token}" if self.token else ""
        return f"http://{shown}:{self.server_address[1]}/{query}"

    def __enter__(self) -> WatchServer:
        threading.Thread(target=self.serve_forever, name="shoal-watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def state(self) -> str:
        """One request at a time: the follower remembers how far it has read."""
        with self._looking:
            return embedded(snapshot(self.follower))

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has disconnected is not our error, and nothing for the terminal."""


class WatchHandler(BaseHTTPRequestHandler):
    """Three URLs, all read-only: the page, the state, the end of a log."""

    server: WatchServer
    server_version, sys_version = "shoal", ""
    timeout = PATIENCE_SECONDS

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self._may(query, asked.path):
            return
        if asked.path == "/":
            self._answer(web_page(self.server.follower.run.name), "text/html; charset=utf-8")
        elif asked.path == "/state.json":
            self._answer(self.server.state(), "application/json")
        elif asked.path == "/log.json":
            self._log(query.get("rank", ["0"])[0])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is /, /state.json and /log.json?rank=0")

    def _may(self, query: dict[str, list[str]], path: str) -> bool:
        if self.server.loopback:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name.lower() not in NAMES:
                self._refuse(
                    HTTPStatus.FORBIDDEN, "asked for under a name that is not this machine's loopback"
                )
                return False
            return True
        given = query.get("token", [""])[0]
        if given and path == "/" and hmac.compare_digest(given.encode(), self.server.token.encode()):
            # The token moves into a cookie and out of the URL, which browsers keep in their history.
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
            self.send_header("Location", "/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        if hmac.compare_digest(self._cookie().encode(), self.server.token.encode()):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "open the address with its token, as shoal watch printed it")
        return False

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return found.value if found else ""

    def _log(self, rank: str) -> None:
        if not rank.isascii() or not rank.isdigit() or int(rank[:6]) >= MOST_RANKS:
            self._refuse(HTTPStatus.BAD_REQUEST, f"a rank is a number below {MOST_RANKS}")
            return
        lines = self.server.follower.log(int(rank[:6]))
        self._answer(json.dumps({"rank": int(rank[:6]), "lines": lines}), "application/json")

    def _answer(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(f"{text}\n", "text/plain; charset=utf-8", status)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent: requests of the page are not worth a line."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
