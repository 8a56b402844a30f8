"""The page in a real Chromium, against a real daemon on the fake model."""

from __future__ import annotations

import json
import os
import re
import sys
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
        expect(page.locator(".turn.model .stats")).to_contain_text("Not complete: stopped")
        had = page.locator(".turn.model .md").inner_text()
        page.get_by_role("button", name="Continue this answer").click()
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
        expect(page.locator("#conversations .open")).to_contain_text("<img")
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


def scripted(folder: Path, *answers: str) -> str:
    """Write what the fake model answers, prompt by prompt; return the path."""
    script = folder / "script.json"
    script.write_text(json.dumps(answers), encoding="utf-8")
    return str(script)


def test_a_retry_and_an_edit_are_versions(browser: Any, tmp_path: Path) -> None:
    """The old answer and what followed it stay, behind arrows; a reload shows the version that was chosen."""
    script = scripted(tmp_path, "one", "two", "three", "four")
    with served(script=script) as address, visit(browser, address) as tab:
        page = tab.open()
        questions, answers = page.locator(".turn.user .md"), page.locator(".turn.model .md")
        tab.say("first")
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        tab.say("second")
        expect(page.locator(".turn.model .stats")).to_have_count(2)
        page.get_by_role("button", name="Retry this answer").first.click()
        expect(page.locator(".versions")).to_contain_text("2 of 2")
        expect(questions).to_have_text(["first"])
        page.get_by_role("button", name="Edit this message").click()
        page.get_by_label("The message").fill("changed")
        page.keyboard.press("Enter")
        expect(questions).to_have_text(["changed"])
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.locator(".turn.user").get_by_role("button", name="Previous version").click()
        expect(questions).to_have_text(["first"])
        page.locator(".turn.model").get_by_role("button", name="Previous version").click()
        expect(questions).to_have_text(["first", "second"])
        expect(answers).to_have_count(2)
        # The focus stays on the arrows: the other one, at the end.
        expect(page.locator(":focus")).to_have_attribute("aria-label", "Next version")
        page.reload()
        expect(questions).to_have_text(["first", "second"])
        page.get_by_role("button", name="New conversation").first.click()
        expect(page.locator(".turn")).to_have_count(0)
        assert page.locator("#conversations li").count() == 1


def test_an_answer_that_a_reload_cuts_is_marked_and_continued(browser: Any, slow: str) -> None:
    """What has come is stored while it comes."""
    with visit(browser, slow) as tab:
        page = tab.open()
        tab.say("Hello")
        expect(page.locator(".turn.model .md")).to_contain_text(re.compile("....."))
        page.reload()
        answer = page.locator(".turn.model")
        expect(answer).to_have_class(re.compile("partial"))
        expect(answer.locator(".stats")).to_contain_text("Not complete: interrupted")
        had = answer.locator(".md").inner_text()
        page.get_by_role("button", name="Continue this answer").click()
        expect(page.locator("#stop")).to_be_visible()
        expect(answer).not_to_have_class(re.compile("partial"))
        page.locator("#stop").click()
        expect(page.locator("#send")).to_be_visible()
        assert answer.locator(".md").inner_text().startswith(had[:5])
        assert page.locator(".turn").count() == 2


FILES = [
    {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"# Title\n```\nx\n```"},
    {"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x00\x1a"},
    {"name": "large.txt", "mimeType": "text/plain", "buffer": b"a" * 1_100_000},
]
DROP = """([selector, type, name, text]) => {
  const files = new DataTransfer();
  files.items.add(new File([text], name, {type: "text/plain"}));
  const data = type === "paste" ? {clipboardData: files} : {dataTransfer: files};
  const Kind = type === "paste" ? ClipboardEvent : DragEvent;
  document.querySelector(selector).dispatchEvent(new Kind(type, {bubbles: true, cancelable: true, ...data}));
}"""


def test_text_files_are_attached(browser: Any, slow: str) -> None:
    """By the button, dropped and pasted; what is no text or too long is refused by name, the rest is sent."""
    with visit(browser, slow) as tab:
        page = tab.open()
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Attach text files").click()
        chooser.value.set_files(FILES)
        expect(page.locator("#files li")).to_have_count(1)
        expect(page.locator("#file-error")).to_contain_text("image.png is no text in UTF-8.")
        expect(page.locator("#file-error")).to_contain_text("large.txt has 1.0 MiB")
        page.evaluate(DROP, ["#log", "drop", "dropped.py", "print(1)"])
        page.evaluate(DROP, ["#say", "paste", "pasted.txt", "unwanted"])
        expect(page.locator("#files li")).to_have_count(3)
        page.get_by_role("button", name="Remove pasted.txt").click()
        with page.expect_request("**/v1/chat/completions") as asked:
            tab.say("Explain these")
        content = asked.value.post_data_json["messages"][0]["content"]
        assert content == (
            "notes.md\n````\n# Title\n```\nx\n```\n````\n\ndropped.py\n```\nprint(1)\n```\n\nExplain these"
        )
        expect(page.locator("#files")).to_be_hidden()
        expect(page.locator(".turn.user summary")).to_have_text(
            [re.compile("notes.md"), re.compile("dropped.py")]
        )
        page.locator("#stop").click()


def test_conversations_are_found_renamed_exported_and_imported(
    browser: Any, tmp_path: Path
) -> None:
    """A search looks into messages; an import adds to what is there."""
    script = scripted(tmp_path, "the lantern", "a boat")
    with served(script=script) as address, visit(browser, address) as tab:
        page, titles = tab.open(), tab.page.locator("#conversations .open")
        tab.say("first")
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.get_by_role("button", name="New conversation").first.click()
        tab.say("second")
        expect(page.locator(".turn.model .stats")).to_have_count(1)
        page.get_by_label("Search conversations").fill("LANTERN")
        expect(titles).to_have_text(["first"])
        expect(page.locator("#conversations .hint")).to_contain_text("lantern")
        page.get_by_label("Search conversations").fill("nowhere")
        expect(page.locator("#none")).to_be_visible()
        page.get_by_label("Search conversations").fill("")
        page.get_by_role("button", name="Rename first").click()
        page.get_by_label("Title").fill("A lamp")
        page.keyboard.press("Enter")
        expect(titles).to_have_text(["second", "A lamp"])
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete A lamp").click()
        expect(titles).to_have_text(["second"])
        page.locator("#import-file").set_input_files(download.value.path())
        expect(page.locator("#import-said")).to_have_text("2 conversations imported.")
        expect(titles).to_have_text(["second", "A lamp"])
        page.locator("#import-file").set_input_files(__file__)
        expect(page.locator("#import-said")).to_contain_text("is no export")
        page.reload()
        expect(titles).to_have_text(["second", "A lamp"])


def test_the_theme_is_chosen_and_stays(browser: Any, slow: str) -> None:
    """As the system has it, then light, then dark; a reload does not flash in the other."""
    with visit(browser, slow, color_scheme="dark") as tab:
        page = tab.open()
        background = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(background)
        page.get_by_role("button", name="Theme: system").click()
        light = page.evaluate(background)
        assert light != dark
        page.reload()
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
        assert page.evaluate(background) == light
        page.get_by_role("button", name="Theme: light").click()
        assert page.evaluate(background) == dark


def test_prompts_suit_the_model(browser: Any, slow: str) -> None:
    """A tiny model is asked for stories, one for code is not; without one that writes there are none."""
    offered = {"storyteller": "story", "qwen-coder-7b": "Python", "llama-70b": "transistor"}
    with visit(browser, slow) as tab:
        page = tab.page
        for name, word in offered.items():
            listed = {"data": [{"id": name, "status": {"value": "loaded"}}]}
            page.route("**/v1/models", lambda route, _, it=listed: route.fulfill(json=it))
            tab.open()
            expect(page.locator(".prompts button").first).to_contain_text(word)
            page.unroute("**/v1/models")
        vectors = {"data": [{"id": "embedder", "capabilities": ["embedding"]}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=vectors))
        tab.open()
        expect(page.locator("#model-state")).to_contain_text("no model of this daemon writes")
        assert page.locator(".prompts button").count() == 0


RICH = r"""- [x] done
- [ ] to do

| left | centre | right |
|:-----|:------:|------:|
| a | b | 1.50 |

```python
def f(): return "x"  # comment
```

Inline $x^2$, \(y\) and money: $5 or $6.

$$
\frac{a}{b}
$$

![a picture](https://example.com/a.png) [link](https://example.com) $\nope{$"""


def test_markdown_is_formatted(browser: Any, tmp_path: Path) -> None:
    """Task lists, alignment, colours and formulas; a picture is a link, and what is no TeX stays as it was written."""
    with served(script=scripted(tmp_path, RICH)) as address, visit(browser, address) as tab:
        page = tab.open()
        tab.say("Show all:\n  as it stands\n```js\nlet x;\n```")
        answer = page.locator(".turn.model .md")
        expect(answer.get_by_role("checkbox")).to_have_count(2)
        expect(answer.get_by_role("checkbox", name="done")).to_be_checked()
        expect(answer.locator("td[align=right]")).to_have_css("text-align", re.compile("right"))
        expect(answer.locator("th[align=center]")).to_have_css("text-align", re.compile("center"))
        expect(answer.locator(".hljs-keyword").first).to_have_text("def")
        expect(answer.locator(".katex")).to_have_count(3)
        expect(answer.locator(".katex-display .frac-line")).to_have_count(1)
        expect(answer).to_contain_text("$5 or $6.")
        expect(answer.get_by_role("link", name="a picture")).to_have_attribute(
            "href", "https://example.com/a.png"
        )
        expect(answer.get_by_role("link", name="link", exact=True)).to_have_attribute(
            "rel", "noopener noreferrer"
        )
        expect(answer.locator(".wrong")).to_have_text(r"\nope{")
        question = page.locator(".turn.user .md")
        expect(question.locator("p")).to_have_text("Show all:\n  as it stands")
        expect(question.locator(".hljs-keyword")).to_have_text("let")


ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg/onload=window.hit=1><style>*{display:none}</style>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<a href=javascript:window.hit=1>a</a> [a](javascript:window.hit=1) [a](JaVaScRiPt&colon;window.hit=1)",
    "[a](&#106;avascript:window.hit=1) [a](data:text/html,<script>window.hit=1</script>) [a](vbscript:x)",
    '[a](https://example.com "" onmouseover=window.hit=1 x="")',
    "![a](x' onerror='window.hit=1) ![a](javascript:window.hit=1)",
    '<javascript:window.hit=1> <https://example.com/" onclick=window.hit=1>',
    '```"><img src=x onerror=window.hit=1>\ncode\n```',
    "```html\n</code></pre><img src=x onerror=window.hit=1>\n```",
    "| <img src=x onerror=window.hit=1> |\n|---|\n| </table><script>window.hit=1</script> |",
    r"$\href{javascript:window.hit=1}{x}$ $\htmlData{x=1}{y}$ $\includegraphics{x}$ $\htmlStyle{color:red}{x}$",
    "$<img src=x onerror=window.hit=1>$ $$</span><script>window.hit=1</script>$$",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1></style></mglyph></table></mtext></math>",
    "<form id=log><input name=children><button formaction=javascript:window.hit=1>x</button></form>",
    "<p id=say class=notice>x</p> <div style='position:fixed;inset:0'>x</div>",
    "[x]: javascript:window.hit=1\n\n[x] [a][x]",
    "- [ ] <input autofocus onfocus=window.hit=1>\n- [x](javascript:window.hit=1)",
    "# <h1 onclick=window.hit=1>x\n\n> <blockquote onclick=window.hit=1>",
]
DANGEROUS = """() => [...document.querySelectorAll(".md *")].filter((one) =>
  /^(script|style|img|iframe|form|object|embed|link|meta|base)$/i.test(one.tagName)
  || [...one.attributes].some(({name, value}) => name.startsWith("on") || name === "id"
    || (/^(href|src|action|formaction)$/.test(name) && !/^(https?|mailto):/.test(value)))
).map((one) => one.outerHTML)"""


def test_hostile_markdown_makes_nothing_but_text(browser: Any, slow: str) -> None:
    """Neither a script nor a request, in answers and in messages; no text of an attack is lost."""
    with visit(browser, slow) as tab:
        page = tab.page
        text = "\n\n".join(ATTACKS)
        reply = events(
            {"choices": [{"delta": {"content": text}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        )
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=reply),
        )
        tab.open()
        tab.say(text)
        answer = page.locator(".turn.model .md")
        expect(answer.locator(".block").nth(20)).to_be_attached()
        expect(page.locator(".turn.user .md .block").nth(3)).to_be_attached()
        expect(answer).to_contain_text("<svg/onload=window.hit=1>")
        assert page.evaluate(DANGEROUS) == []
        for link in page.locator(".md a, .md h1, .md blockquote, .md input").all():
            link.dispatch_event("mouseover")
            link.dispatch_event("focus")
        assert page.evaluate("window.hit") is None
        expect(page.locator("#log")).to_be_visible()


N = 60_000


def long(unit: str) -> str:
    """Return a text of one shape that is long."""
    return unit * (N // len(unit))


SHAPES = [
    *(f"# {long('#')}x", f"# a{long(' ')}x", f"a{long('`')}", long("a ` "), long("``a`")),
    "a " + " ".join("`" * n for n in range(1, 450)),
    *map(long, ["*a", "**a ", "a**", "~~a ", "a[", "[a](", "![", "[a](http://a   "]),
    *map(long, ["<http://", "a\\*", "[`*~", "`a``b*", "*a**b~~c`d[e](f", "<a ", "<!--", "&"]),
    *map(long, ["$a$ ", "$$", "\\(", "\\[a", "a@b", "b [a]: b\n", "[a]", "- ", "_ ", " ", "> "]),
    *map(long, ["a\n", "- a\n", "|a|\n", "> a\n", "```\n", "1. a\n\n", "\n"]),
    "\n".join(f"{' ' * n}- a" for n in range(400)),
    *(f"|a|\n|-|\n{long('|')}", f"|a|\n|-|\n{long('|a|' + chr(10))}", f"```js\n{long('a(')}"),
    *(f"$${long('{')}$$", f"$${chr(92)}def{chr(92)}a{{{chr(92)}a{chr(92)}a}}{chr(92)}a$$"),
]


FORMAT = """async (text) => {
  const {show} = await import('./markdown.js'), shape = document.createElement('div');
  shape.className = 'md shape';
  document.querySelector('.shape')?.remove();
  document.querySelector('#main').append(shape);
  const formatted = new Promise((resolve) => shape.addEventListener('formatted', resolve, {once: true}));
  show(shape, text, true);
  await formatted;
}"""


def test_text_of_any_shape_is_shown_and_the_page_stays_usable(browser: Any, slow: str) -> None:
    """Formatted, or as it was written where that would take too long."""
    with visit(browser, slow) as tab:
        page = tab.open()
        for text in SHAPES:
            page.evaluate(FORMAT, text)
            assert page.locator(".shape").text_content() or not text.strip()
        page.evaluate(FORMAT, "**still** formatted")
        expect(page.locator(".shape strong")).to_have_text("still")


AXE = (
    Path(os.environ.get("UMA_SDK_NODE") or Path(sys.prefix) / "node")
    / "node_modules/axe-core/axe.min.js"
)
VIOLATIONS = """() => axe.run().then(({violations}) => violations
  .filter(({impact}) => ["serious", "critical"].includes(impact))
  .map(({id, nodes}) => `${id}: ${nodes.map(({html}) => html).join(" ").slice(0, 300)}`))"""


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make setup-test")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(browser: Any, tmp_path: Path, scheme: str) -> None:
    """No serious violation that axe finds, in each view and dialog, wide and narrow."""
    script = scripted(tmp_path, f"<think>hm</think>{RICH}\n\n> quote `code`", "two")
    with served(script=script) as address, visit(browser, address, color_scheme=scheme) as tab:
        page = tab.open()

        def check(place: str) -> None:
            page.evaluate(AXE.read_text(encoding="utf-8"))
            assert page.evaluate(VIOLATIONS) == [], place

        expect(page.locator(".prompts")).to_be_visible()
        check("welcome")
        page.locator("#file").set_input_files(FILES[:2])
        page.locator("#show-settings").click()
        check("settings and files")
        tab.say("Show all")
        expect(page.locator(".katex")).to_have_count(3)
        page.get_by_role("button", name="Retry this answer").click()
        expect(page.locator(".versions")).to_be_visible()
        page.get_by_role("button", name="Previous version").click()
        check("versions")
        page.get_by_role("button", name="Edit this message").click()
        page.get_by_role("button", name="Rename").click()
        check("edit and rename")
        page.set_viewport_size({"width": 390, "height": 800})
        page.get_by_role("button", name="Conversations").click()
        check("narrow")
        page.get_by_role("button", name="Keys of the keyboard").click()
        check("keys")
        page.keyboard.press("Escape")
        with posting(address, app="editor"):
            page.goto(f"{address}/ui/#/batch")
            expect(page.locator("#gauges .gauge")).to_have_count(5)
            page.locator("#table summary").click()
            check("batch")


def test_a_screen_reader_hears_paragraphs_and_the_end(browser: Any, tmp_path: Path) -> None:
    """In a region of its own, which is not read token by token."""
    script = scripted(tmp_path, "One paragraph.\n\nAnother.")
    with served(script=script) as address, visit(browser, address) as tab:
        page = tab.open()
        tab.say("Hello")
        heard = page.locator("#heard[aria-live=polite] p")
        expect(heard).to_have_text(
            ["Answering.", "One paragraph.", "Another.", "The answer is complete."]
        )


@pytest.mark.parametrize("missing", ["purify.min.js", "marked.esm.js", "katex.min.js"])
def test_text_is_shown_where_a_library_cannot_be_loaded(
    browser: Any, tmp_path: Path, missing: str
) -> None:
    """As it was written; without KaTeX only formulas are."""
    with (
        served(script=scripted(tmp_path, "**bold** $x^2$")) as address,
        visit(browser, address) as tab,
    ):
        page = tab.page
        page.route(f"**/{missing}", lambda route: route.abort())
        tab.open()
        tab.say("Hello")
        written = "bold x^2" if "katex" in missing else "**bold** $x^2$"
        expect(page.locator(".turn.model .md")).to_have_text(written)
        expect(page.locator(".turn.user .md")).to_have_text("Hello")


def test_a_first_load_is_small_and_paints_before_the_libraries(browser: Any, slow: str) -> None:
    """At most 700 kB with an answer that has code and formulas, without compression; the policy refuses none of it."""
    sizes: dict[str, int] = {}
    with visit(browser, slow) as tab:
        page = tab.page
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("response", lambda reply: sizes.update({reply.url: len(reply.body())}))
        body = events(
            {"choices": [{"delta": {"content": "```js\nlet x\n```\n$$x^2$$"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        )
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        tab.open()
        tab.say("Hello")
        expect(page.locator(".katex-html")).to_be_attached()
        page.wait_for_load_state("networkidle")
        painted, loaded = page.evaluate(
            "[performance.getEntriesByName('first-contentful-paint')[0].startTime,"
            " performance.getEntriesByType('resource').find(({name}) => name.includes('purify')).startTime]"
        )
        assert painted < loaded
        assert complaints == []
    static = {url: size for url, size in sizes.items() if "/ui/" in url}
    assert any("katex.min.js" in url for url in static)
    assert any("woff2" in url for url in static)
    assert sum(static.values()) <= 700_000


def test_tabs_do_not_erase_what_others_write(browser: Any, tmp_path: Path) -> None:
    """Neither a new conversation, nor a turn, nor that one was deleted; each tab shows the others' at once."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([f"answer {n}" for n in range(9)]), encoding="utf-8")
    with served(script=str(script)) as address, visit(browser, address) as tab:
        idle = tab.open()
        tab.say("first")
        expect(idle.locator(".turn.model .stats")).to_have_count(1)
        other = tab.context.new_page()
        other.goto(f"{address}/ui/")
        other.get_by_role("button", name="first", exact=True).click()
        expect(other.locator(".turn.user .body")).to_have_text("first")
        other.get_by_label("Message", exact=True).fill("second")
        other.keyboard.press("Enter")
        expect(idle.locator(".turn.user .body")).to_have_text(["first", "second"])
        expect(idle.locator(".turn.model .stats")).to_have_count(2)
        other.get_by_role("button", name="New conversation").first.click()
        other.get_by_label("Message", exact=True).fill("third")
        other.keyboard.press("Enter")
        expect(other.locator(".turn.model .stats")).to_have_count(1)
        expect(idle.locator("#conversations .open")).to_have_text(["third", "first"])
        idle.close()
        other.reload()
        expect(other.locator("#conversations .open")).to_have_text(["third", "first"])
        expect(other.locator(".turn.user .body")).to_have_text("third")
        third = tab.context.new_page()
        third.goto(f"{address}/ui/")
        other.on("dialog", lambda dialog: dialog.accept())
        other.get_by_role("button", name="Delete first").click()
        expect(third.locator("#conversations .open")).to_have_text(["third"])
        third.close()
        other.reload()
        expect(other.locator("#conversations .open")).to_have_text(["third"])


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
        expect(page.locator("#idle")).to_be_visible()
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
    for attempt in (
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 3'}))",
        "document.body.append(Object.assign(document.createElement('script'), {src: 'theme.js'}))",
        "document.body.innerHTML = '<p>markup from a string</p>'",
        "setTimeout('document.title = 3')",
        "trustedTypes.createPolicy('another', {createHTML: (text) => text})",
    ):
        assert page.evaluate(f"() => {{ try {{ {attempt} }} catch (error) {{ return true }} }}")
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
        expect(page.locator("#tick")).to_contain_text(
            re.compile(r"Tick \d+ took .* request \d+: 1 token")
        )
        expect(page.locator("#pause")).to_have_text("Go on")
        page.get_by_role("button", name="Explain request").click()
        expect(page.locator("#story")).to_contain_text(re.compile("tokens? of prompt"))
        page.keyboard.press("Escape")
        page.locator("#table summary").click()
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
        expect(page.locator("#say")).to_be_focused()
        page.get_by_role("link", name="Chat").focus()
        page.keyboard.press("g")
        page.keyboard.press("b")
        expect(page.locator("#gauges .gauge")).to_have_count(5)
        page.get_by_role("link", name="Chat").click()
        until(page, lambda: any(url.startswith("ended") and "/events" in url for url in asked))


@contextmanager
def posting(address: str, app: str) -> Iterator[None]:
    """Let a program have a long answer as a stream."""
    host = address.removeprefix("http://")
    asked = {"prompt": "Hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    body = json.dumps(asked)
    with closing(HTTPConnection(host, timeout=30)) as connection:
        headers = {"Content-Type": "application/json", "X-UMA-App": app}
        connection.request("POST", "/v1/completions", body, headers)
        connection.getresponse()
        yield
