"""The page in a real Chromium, against a real daemon on the fake model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser_kit import Visit, chromium, until
from test_http_sdk import served

pytestmark = pytest.mark.daemon

HOSTILE = '<img src=x onerror="document.title=1"> **bold** <script>document.title=2</script>'
SAID = f"<think>It wants much.</think>{HOSTILE}\n\n1. one\n   - two\n\n```html\n<b>code</b>\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of this module."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def slow(browser: Any) -> Iterator[str]:
    """The address of a daemon whose answers take a while."""
    with served(cost="0.02") as address:
        yield address


@contextmanager
def visit(browser: Any, address: str, **options: Any) -> Iterator[Visit]:
    """Open a tab; at its end nothing may have gone wrong in it."""
    found = Visit(browser, address, **options)
    yield found
    found.close()


def expect(locator: Any) -> Any:
    """Wait for what a locator finds."""
    from playwright.sync_api import expect as wait

    return wait(locator)


def test_tokens_are_seen_before_the_end_and_stop_stops(browser: Any, slow: str) -> None:
    """By the keyboard alone; what has come stays, with a way to go on."""
    with visit(browser, slow) as tab:
        page = tab.open()
        assert page.url == f"{slow}/ui/"
        tab.say("Hello")
        expect(page.locator(".turn.model .md")).to_contain_text(re.compile("....."))
        expect(page.locator("#stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".turn.model .stats")).to_contain_text("stopped")
        had = page.locator(".turn.model .md").inner_text()
        page.get_by_role("button", name="Go on with this answer").click()
        expect(page.locator("#stop")).to_be_visible()
        page.locator("#stop").click()
        expect(page.locator("#send")).to_be_visible()
        assert page.locator(".turn.model .md").inner_text().startswith(had[:5])
        assert page.locator(".turn").count() == 2


def test_what_is_said_is_text(browser: Any, tmp_path: Path) -> None:
    """Markup in an answer, in a message and in a title is shown; Markdown becomes elements."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([SAID] * 3), encoding="utf-8")
    with served(script=str(script)) as address, visit(browser, address) as tab:
        page = tab.open()
        tab.say(HOSTILE)
        answer = page.locator(".turn.model .md")
        expect(page.locator(".turn.model .stats")).to_contain_text("tokens/s")
        expect(answer).to_contain_text("<script>document.title=2</script>")
        expect(answer.locator("strong")).to_have_text("bold")
        expect(answer.locator("ol > li > ul > li")).to_have_text("two")
        expect(answer.locator("pre")).to_have_text("<b>code</b>")
        expect(answer.locator("td")).to_have_text(["1", "2"])
        expect(page.locator(".turn.user .body")).to_have_text(HOSTILE)
        expect(page.locator(".talks .open")).to_contain_text("<img")
        expect(page.locator(".thought summary")).to_contain_text("3 words")
        assert page.locator("#main img, #main script").count() == 0
        assert page.title() == "uma-trio"


def events(*told: dict[str, Any]) -> str:
    """Return a stream of server-sent events."""
    return "".join([*(f"data: {json.dumps(each)}\n\n" for each in told), "data: [DONE]\n\n"])


def test_tool_calls_and_names_of_models_are_text(browser: Any, slow: str) -> None:
    """Whatever a model calls, and whatever a file is called; a model that is loaded says how far it is."""
    call = {"index": 0, "function": {"name": HOSTILE, "arguments": json.dumps({"x": HOSTILE})}}
    parts = ({"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": "…"}}]})
    stream = events(
        {"choices": [], "load_progress": {"model": HOSTILE, "state": HOSTILE, "progress": 0.4}},
        *({"choices": [{"delta": part}]} for part in parts),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    )
    loading = {"value": "loading", "progress": 0.4, "detail": f"{HOSTILE} is loaded, 40 %"}
    listed = {"data": [{"id": HOSTILE, "status": loading, "meta": {"size": 5, "n_ctx": 9}}]}
    with visit(browser, slow) as tab:
        tab.page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        tab.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=stream),
        )
        page = tab.open()
        expect(page.locator("#model option")).to_contain_text("<img")
        expect(page.locator("#model-state")).to_contain_text("is loaded, 40 %")
        tab.say("Look at it")
        expect(page.locator(".call summary")).to_have_text(f"Calls {HOSTILE}")
        expect(page.locator(".call pre")).to_have_text(json.dumps({"x": HOSTILE}) + "…")
        expect(page.locator(".turn.model .who")).to_have_text(HOSTILE)
        page.keyboard.press("Tab")
        page.goto(f"{slow}/ui/#/batch")
        expect(page.locator("#models")).to_contain_text("<script>")
        with page.expect_request(lambda request: "model=%3Cimg" in request.url):
            page.locator("#models button").click()
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Batch · uma-trio"


def test_conversations_stay_and_are_changed(browser: Any, tmp_path: Path) -> None:
    """A reload finds them; an edited question and a retry take the place of what was there."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([f"answer {n}" for n in range(4)]), encoding="utf-8")
    with served(script=str(script)) as address, visit(browser, address) as tab:
        page = tab.open()
        tab.say("first")
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.reload()
        expect(page.locator(".turn.user .body")).to_have_text("first")
        page.get_by_role("button", name="Answer again").click()
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.get_by_role("button", name="Edit this message").click()
        page.get_by_label("The message").fill("second")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user .body")).to_have_text(["second"])
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.get_by_role("button", name="New conversation").first.click()
        expect(page.locator(".turn")).to_have_count(0)
        assert page.locator(".talks li").count() == 1


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Any, tmp_path: Path) -> None:
    """A wrong one shows the form again and no data."""
    keys = tmp_path / "keys"
    keys.write_text("sesame\n", encoding="utf-8")
    keys.chmod(0o600)
    with served(http_key_file=str(keys)) as address, visit(browser, address) as tab:
        page = tab.open()
        for key in ("wrong", "sesame"):
            expect(page.locator("#key-dialog")).to_be_visible()
            assert page.locator("#model option").count() == 0
            page.get_by_role("textbox", name="Key").fill(key)
            page.keyboard.press("Enter")
            if key == "wrong":
                expect(page.locator("#key-said")).to_contain_text("does not know that key")
        expect(page.locator("#model option")).to_have_count(1)
        tab.say("Hello")
        expect(page.locator(".turn.model .md")).to_contain_text(re.compile("."))
        assert page.evaluate("sessionStorage.getItem('uma.key')") == "sesame"
        assert page.evaluate("JSON.stringify(localStorage)").count("sesame") == 0


def test_a_daemon_that_dies_is_told_of_and_found_again(browser: Any, tmp_path: Path) -> None:
    """What has come of the answer stays."""
    with visit_of_a_dying(browser) as (tab, page):
        expect(page.locator("#notice")).to_be_visible()
        expect(page.locator(".turn.model .error")).to_contain_text(re.compile("."))
        with served(port=int(tab.address.rpartition(":")[2])):
            expect(page.locator("#notice")).to_be_hidden()
            expect(page.locator("#state")).to_have_text("connected")


def test_the_batch_tells_of_a_daemon_that_dies_and_finds_it_again(browser: Any) -> None:
    """With the picture that there was; a new daemon's begins anew."""
    with served(cost="0.02", die="60") as address:
        tab = Visit(browser, address)
        page = tab.open("/ui/#/batch")
        expect(page.locator("#gauges .gauge")).to_have_count(5)
        with posting(address, app="editor"):
            expect(page.locator("#legend")).to_contain_text("editor")
            expect(page.locator("#notice")).to_be_visible()
    expect(page.locator("#state")).to_have_text("no daemon")
    with served(port=int(address.rpartition(":")[2])):
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#nothing")).to_be_visible()
    tab.close()


@contextmanager
def visit_of_a_dying(browser: Any) -> Iterator[tuple[Visit, Any]]:
    """Open a tab that has half an answer of a daemon which is not there any more."""
    with served(cost="0.02", die="60") as address:
        tab = Visit(browser, address)
        page = tab.open()
        tab.say("Hello")
        expect(page.locator(".turn.model .md")).to_contain_text(re.compile("..."))
        expect(page.locator(".turn.model .error")).to_be_visible()
    yield tab, page
    tab.close()


@pytest.mark.parametrize("size", [(1280, 800), (800, 900), (390, 800), (640, 400)], ids=str)
def test_nothing_is_wider_than_the_window(browser: Any, slow: str, size: tuple[int, int]) -> None:
    """At the width of a desk, a tablet and a phone, and at 200 % zoom, which is half a window."""
    width, height = size
    view = {"width": width, "height": height}
    with visit(browser, slow, viewport=view, color_scheme="dark") as tab:
        page = tab.open()
        tab.say("x" * 300)
        expect(page.locator(".turn.model .md")).to_contain_text(re.compile("..."))
        for name in ("#/chat", "#/batch"):
            page.goto(f"{slow}/ui/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", lightness)[:3])) < 60


def test_the_policy_holds_in_a_browser(browser: Any, slow: str) -> None:
    """Neither another host nor a script in the page."""
    found = Visit(browser, slow)
    page = found.open()
    refused = page.evaluate(
        "fetch('http://192.0.2.1/').then(() => false, (error) => error instanceof TypeError)"
    )
    assert refused
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 3'}))"
    )
    assert page.title() == "uma-trio"
    found.context.close()


ATTACK = """<!doctype html><meta name=referrer content=POLICY><iframe name=f></iframe><script>
const json = '{"prompt": "a", "max_tokens": 1}', bytes = new TextEncoder().encode(json);
const typed = (type) => new Blob([json], {type}), form = "application/x-www-form-urlencoded";
const to = (body) => fetch("TARGET", {method: "POST", mode: "no-cors", body}).catch(() => 0);
[json, bytes, typed(""), typed(form), new URLSearchParams({[json]: ""})].forEach(to);
navigator.sendBeacon("TARGET", bytes);
navigator.sendBeacon("TARGET", typed(form));
for (const enctype of ["text/plain", form]) {
  const sent = Object.assign(document.createElement("form"),
    {method: "post", action: "TARGET", target: "f", enctype});
  sent.append(Object.assign(document.createElement("input"), {name: '{"prompt": "', value: '"}'}));
  document.body.append(sent);
  sent.submit();
}
</script>"""


@pytest.mark.parametrize("policy", ["unsafe-url", "no-referrer"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_has_nothing_computed(
    browser: Any, slow: str, host: str, policy: str
) -> None:
    """Of the same site or another; by everything that a page may post unasked, also without a type."""
    target = f"{slow}/v1/completions"
    text = ATTACK.replace("TARGET", target).replace("POLICY", policy)
    statuses: list[int] = []
    with page_served(text) as port:
        context = browser.new_context()
        page = context.new_page()
        page.on("response", lambda reply: reply.url == target and statuses.append(reply.status))
        page.goto(f"http://{host}:{port}/")
        until(page, lambda: len(statuses) >= 8)  # of two forms for one frame the first is given up
        context.close()
    assert set(statuses) == {403}


@contextmanager
def page_served(text: str) -> Iterator[int]:
    """Serve a page on a port of this machine, as a browser's rules for local networks want it; return the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def pixels(page: Any) -> int:
    """Return how many colours the picture of the batch has."""
    found: int = page.evaluate(
        """() => { const c = document.querySelector("#ticks");
        const d = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer);
        return new Set(d).size; }"""
    )
    return found


def test_the_batch_is_seen_while_it_computes(browser: Any, slow: str) -> None:
    """Columns by program, requests with a way to their explanation, names as text; it can be paused."""
    with visit(browser, slow) as tab, posting(slow, app=HOSTILE):
        page = tab.open("/ui/#/batch")
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        expect(page.locator("#requests tbody")).to_contain_text("<img src=x")
        expect(page.locator("#legend")).to_contain_text("<script>")
        expect(page.locator("#gauges")).to_contain_text("1 of 8")
        expect(page.locator("#memory")).to_contain_text("used")
        expect(page.locator("#models")).to_contain_text("fake")
        until(page, lambda: pixels(page) > 4)
        page.locator("#ticks").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#tick-said")).to_contain_text(
            re.compile(r"Tick \d+ took .* request \d+: 1 token")
        )
        expect(page.locator("#pause")).to_have_text("Go on")
        page.get_by_role("button", name="Explain request").click()
        expect(page.locator("#story")).to_contain_text(re.compile("tokens? of prompt"))
        page.keyboard.press("Escape")
        page.locator("#tabled summary").click()
        expect(page.locator("#ticks-table tbody tr").first).to_contain_text("<img")
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Batch · uma-trio"


def test_nobody_watches_where_nobody_looks(browser: Any, slow: str) -> None:
    """The chat asks for no ticks, and the view of the batch ends its stream when it is left."""
    asked: list[str] = []
    with visit(browser, slow) as tab:
        tab.page.on("request", lambda request: asked.append(request.url))
        tab.page.on("requestfailed", lambda request: asked.append(f"ended {request.url}"))
        page = tab.open()
        expect(page.locator("#model option")).to_have_count(1)
        assert not [url for url in asked if "/events" in url]
        page.keyboard.press("g")
        page.keyboard.press("b")
        expect(page.locator("#gauges .gauge")).to_have_count(5)
        page.get_by_role("link", name="Chat").click()
        until(page, lambda: any(url.startswith("ended") and "/events" in url for url in asked))


@contextmanager
def posting(address: str, app: str) -> Iterator[None]:
    """Let a program have a long answer as a stream."""
    host = address.removeprefix("http://")
    body = json.dumps({"prompt": "Hello", "max_tokens": 2000, "stream": True})
    with closing(HTTPConnection(host, timeout=30)) as connection:
        headers = {"Content-Type": "application/json", "X-UMA-App": app}
        connection.request("POST", "/v1/completions", body, headers)
        connection.getresponse()
        yield
