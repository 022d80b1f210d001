"""A Hub on this machine: what ``huggingface_hub`` asks for when it downloads the files of one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(name: str, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what was asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, with_content: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(f"{self.command} {path}")
            files = sorted(file for file in directory.iterdir() if file.is_file())
            if path == f"/api/models/{name}/revision/main" or path == f"/api/models/{name}/revision/{COMMIT}":
                siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
                content = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False}
                self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, with_content)
                return
            if path.startswith(f"/api/models/{name}/tree/"):
                rows = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                    for file in files
                ]
                self._send(json.dumps(rows).encode(), {"Content-Type": "application/json"}, with_content)
                return
            found = next(
                (
                    file
                    for file in files
                    if path in (f"/{name}/resolve/{r}/{file.name}" for r in (COMMIT, "main"))
                ),
                None,
            )
            if found is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = found.read_bytes()
            tag = hashlib.sha256(body).hexdigest()
            self._send(
                body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}, with_content
            )

        def _send(self, body: bytes, headers: dict[str, str], with_content: bool) -> None:
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_content:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
