"""The page for people as it is served: its bytes, its policy, and who is led there."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from hashlib import sha256
from importlib import resources
from pathlib import Path

import pytest
from http_kit import http_house
from trio.testing import MockClock

from uma_trio.http.page import POLICY, names, read

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
CASES = Path(__file__).resolve().parent / "page_cases.mjs"
NODE = shutil.which("node")
MARKUP = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|\beval\b|new Function|createContextualFragment"


def test_the_page_is_small() -> None:
    """700 kB in all without fonts, before compression; a browser loads about half of it with the first answer."""
    assert sum(len(read(name).data) for name in names() if not name.endswith(".woff2")) <= 700_000


def test_markup_is_made_in_one_place() -> None:
    """What models, programs and people write becomes text nodes, or passes DOMPurify."""
    for name in own_scripts():
        assert not re.search(MARKUP, read(name).data.decode()), name
    sanitizing = [name for name in own_scripts() if b".sanitize(" in read(name).data]
    assert sanitizing == ["markdown.js"]
    assert "require-trusted-types-for 'script'" in POLICY


def own_scripts() -> list[str]:
    """Return the names of the scripts that are not vendored."""
    return [name for name in names() if name.endswith(".js") and "/" not in name]


def test_no_file_names_another_host() -> None:
    """The page works without a network."""
    for name in names():
        if "/" not in name:
            text = read(name).data.decode()
            hosts = set(re.findall(r"(?:https?:)?//([a-z0-9-]+(?:\.[a-z0-9-]+)+)", text))
            assert hosts <= {"www.w3.org"}, f"{name}: a name space of SVG is no request"


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    """The policy would refuse them."""
    text = read("index.html").data.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)
    assert "unsafe" not in POLICY


def test_the_libraries_are_those_that_were_pinned() -> None:
    """Every file as it was published, each with its licence."""
    vendor = Path(str(resources.files("uma_trio.http.page") / "static" / "vendor"))
    known = set()
    for library in json.loads((vendor / "libraries.json").read_text(encoding="utf-8")):
        assert "LICENSE" in library["files"]
        for name, digest in library["files"].items():
            path = vendor / library["folder"] / name
            known.add(path)
            assert sha256(path.read_bytes()).hexdigest() == digest, path
    assert known == {path for path in vendor.glob("*/**/*") if path.is_file()}


SERVED = {
    "": "text/html; charset=utf-8",
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "favicon.svg": "image/svg+xml",
    "vendor/katex/fonts/KaTeX_Main-Regular.woff2": "font/woff2",
}
NOT_SERVED = (
    *("other.js", "../health", "package.json", "__init__.py", "vendor", "vendor/"),
    *("vendor/libraries.json", "vendor/marked/LICENSE", "vendor/../__init__.py"),
)


async def test_the_page_and_its_files_are_served(autojump_clock: MockClock) -> None:
    """Each with its type and the policy; without a key, because the page has no data."""
    async with http_house(keys=(b"secret",)) as daemon:
        for name, kind in SERVED.items():
            answer = await daemon.ask("GET", f"/ui/{name}")
            assert answer.status == 200
            assert answer.headers["content-type"] == kind
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.body == read(name or "index.html").data
        for name in NOT_SERVED:
            assert (await daemon.ask("GET", f"/ui/{name}")).status == 404, name


async def test_a_page_that_is_known_is_not_sent_again(autojump_clock: MockClock) -> None:
    """The tag is of the bytes, so a newer daemon sends its own page."""
    async with http_house() as daemon:
        for accepted in ("identity", "gzip"):
            first = await daemon.ask("GET", "/ui/app.js", Accept_Encoding=accepted)
            tag = first.headers["etag"]
            again = await daemon.ask(
                "GET", "/ui/app.js", Accept_Encoding=accepted, If_None_Match=tag
            )
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        other = await daemon.ask("GET", "/ui/app.js", If_None_Match='"other"')
        assert other.status == 200


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        *(("gzip, deflate, br, zstd", True), ("br, gzip;q=0.5", True), ("GZIP", True)),
        *(("identity", False), ("br", False), ("gzip;q=0", False), ("gzip; q=0.000", False)),
    ],
)
async def test_the_page_is_compressed_for_clients_that_accept_it(
    autojump_clock: MockClock, accepted: str, *, is_packed: bool
) -> None:
    """By gzip; the two encodings have different tags. Fonts are compressed as they are."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", "/ui/app.js", Accept_Encoding=accepted)
        plain = read("app.js").data
        assert answer.headers.get("content-encoding") == ("gzip" if is_packed else None)
        assert (gzip.decompress(answer.body) if is_packed else answer.body) == plain
        assert answer.headers["etag"].endswith('-gzip"') == is_packed
        assert "accept-encoding" in answer.headers["vary"].lower()
        font = await daemon.ask(
            "GET", "/ui/vendor/katex/fonts/KaTeX_Main-Regular.woff2", Accept_Encoding=accepted
        )
        assert "content-encoding" not in font.headers


@pytest.mark.parametrize(("path", "place"), [("/", "ui/"), ("/ui", "ui/"), ("/v1/ui", "ui/")])
async def test_a_browser_is_led_to_the_page(
    autojump_clock: MockClock, path: str, place: str
) -> None:
    """By an address that also holds behind a proxy which serves the daemon below a path."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", path, Accept=BROWSER)
        assert (answer.status, answer.headers["location"]) == (307, place)


@pytest.mark.parametrize("accept", [{}, {"Accept": "*/*"}, {"Accept": "application/json"}])
async def test_a_program_gets_what_it_got(
    autojump_clock: MockClock, accept: dict[str, str]
) -> None:
    """Clients of Ollama look there whether a server is up."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", "/", **accept)
        assert (answer.status, answer.body) == (200, b"uma-trio is running\n")


async def test_a_page_of_another_site_cannot_ask(autojump_clock: MockClock) -> None:
    """It sees neither the page nor what the page asks for."""
    async with http_house() as daemon:
        for path in ("/ui/", "/events", "/v1/models"):
            answer = await daemon.ask("GET", path, Origin="http://evil.example")
            assert answer.status == 403


def in_node(*arguments: str) -> str:
    """Run the cases' program; return what it prints."""
    done = subprocess.run(
        [str(NODE), CASES, *arguments], capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(NODE is None, reason="there is no node")
@pytest.mark.parametrize("case", json.loads(in_node()) if NODE else ())
def test_the_script_of_the_page(case: str) -> None:
    """Conversations among tabs and their versions, what is sent, and what an answer's stream does."""
    in_node(case)
