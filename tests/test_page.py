"""The page for people as it is served: its bytes, its policy, and who is led there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from http_kit import http_house
from trio.testing import MockClock

from uma_trio.http.page import POLICY, files

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
CASES = Path(__file__).resolve().parent / "page_cases.mjs"
NODE = shutil.which("node")
MARKUP = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|\beval\b|new Function|createContextualFragment"


def test_the_page_is_small() -> None:
    """64 kB in all, so that it is there at once on a slow line."""
    assert sum(len(file.data) for file in files().values()) <= 64_000


def test_the_script_makes_no_markup_from_texts() -> None:
    """What models, programs and people write is shown as text: nothing parses it."""
    assert not re.search(MARKUP, files()["app.js"].data.decode())


def test_no_file_names_another_host() -> None:
    """The page works without a network."""
    for name, file in files().items():
        hosts = set(re.findall(r"(?:https?:)?//([a-z0-9-]+(?:\.[a-z0-9-]+)+)", file.data.decode()))
        assert hosts <= {"www.w3.org"}, f"{name}: a name space of SVG is no request"


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    """The policy would refuse them."""
    text = files()["index.html"].data.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)
    assert "unsafe" not in POLICY


async def test_the_page_and_its_files_are_served(autojump_clock: MockClock) -> None:
    """Each with its type and the policy; without a key, because the page has no data."""
    kinds = {"": "text/html", "index.html": "text/html", "app.js": "text/javascript"}
    async with http_house(keys=(b"secret",)) as daemon:
        for name, kind in {**kinds, "app.css": "text/css"}.items():
            answer = await daemon.ask("GET", f"/ui/{name}")
            assert answer.status == 200
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.body == files()[name or "index.html"].data
        assert (await daemon.ask("GET", "/ui/other.js")).status == 404
        assert (await daemon.ask("GET", "/ui/../health")).status == 404


async def test_a_page_that_is_known_is_not_sent_again(autojump_clock: MockClock) -> None:
    """The tag is of the bytes, so a newer daemon sends its own page."""
    async with http_house() as daemon:
        first = await daemon.ask("GET", "/ui/app.js")
        again = await daemon.ask("GET", "/ui/app.js", If_None_Match=first.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        other = await daemon.ask("GET", "/ui/app.js", If_None_Match='"other"')
        assert other.status == 200


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
    """Storage among tabs, what it sends and shows, and Markdown, which takes time by its length alone."""
    in_node(case)
