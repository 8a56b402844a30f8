"""A mirror of the hub on this machine, which can cut, lie and redirect."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


class Mirror:
    """The files of one repository, ``owner/repo``, and what is wrong with the server.

    `cuts` are numbers of bytes after which answers end, one for each answer in turn; `wrong` answers have one
    byte changed; with `elsewhere` files are fetched from that address; `resumes` is whether ranges are heard.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.cuts: list[int] = []
        self.wrong = 0
        self.elsewhere = ""
        self.resumes = True
        self.status = 200
        self.asked: list[tuple[str, str, str | None, str | None]] = []  # method, path, range, key
        self.url = ""

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file."""
        return hashlib.sha256(self.files[name]).hexdigest()

    def siblings(self) -> list[dict[str, object]]:
        """Return the list of the repository's files."""
        return [
            {
                "rfilename": name,
                "size": len(text),
                "lfs": {"sha256": self.digest(name), "size": len(text), "pointerSize": 130},
            }
            for name, text in self.files.items()
        ]

    @property
    def fetched(self) -> list[str]:
        """The files that were asked for."""
        return [
            path for method, path, _, _ in self.asked if method == "GET" and "/resolve/" in path
        ]

    @property
    def ranges(self) -> list[str]:
        """The ranges that were asked for."""
        return [wanted for method, _, wanted, _ in self.asked if method == "GET" and wanted]


@contextmanager
def mirror(files: Mapping[str, bytes]) -> Iterator[Mirror]:
    """Serve `files` until the block ends."""
    about = Mirror(files)

    class Handler(_Handler):
        mirrored = about

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    about.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield about
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    mirrored: Mirror

    def do_HEAD(self) -> None:
        """Answer with the head of a file."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Answer with the list, or a file."""
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, *, body: bool) -> None:
        m, path = self.mirrored, unquote(urlsplit(self.path).path)
        m.asked.append(
            (self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        if m.status != 200:
            self._send(m.status, {}, b"no")
        elif path.startswith("/api/"):
            about = {"id": "owner/tiny-GGUF", "sha": COMMIT, "siblings": m.siblings()}
            self._send(200, {}, json.dumps(about).encode())
        elif m.elsewhere and body:
            self._send(302, {"Location": f"{m.elsewhere}{path}"}, b"")
        else:
            name = next((name for name in m.files if path.endswith(f"/{name}")), "")
            self._file(name, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        m = self.mirrored
        if name not in m.files:
            self._send(404, {}, b"")
            return
        text = m.files[name]
        if not body:
            self._send(200, {"X-Repo-Commit": COMMIT}, b"", length=len(text))
            return
        if m.wrong > 0:
            m.wrong -= 1
            text = bytes([text[0] ^ 1]) + text[1:]
        begin, status, about = 0, 200, {}
        if m.resumes and (wanted := self.headers.get("Range")):
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            status = 206
            about = {"Content-Range": f"bytes {begin}-{len(text) - 1}/{len(text)}"}
        rest = text[begin:]
        cut = m.cuts.pop(0) if m.cuts else len(rest)
        self._send(status, about, rest[:cut], length=len(rest))

    def _send(
        self, status: int, about: Mapping[str, str], text: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in about.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text) if length is None else length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)
