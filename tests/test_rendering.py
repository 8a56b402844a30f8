"""The processes that render: one request each, replaced where they end; and reshaped conversations in every API."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from http_kit import http_house
from reply_kit import chatml
from trio.testing import MockClock

from uma_trio.confined.workers import Worker
from uma_trio.text.chat import Message
from uma_trio.text.prompt import Unrenderable
from uma_trio.text.template import ChatTemplate, NotRendered, renderer
from uma_trio_sim.fake import CHATML, linear_cost
from uma_trio_sim.scripted import ScriptedBackend

HI = [Message("user", "Hi")]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_slow_template_delays_nobody_else() -> None:
    """Others are rendered in another process meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(ChatTemplate(ENDLESS).check)
        assert ChatTemplate(CHATML).render(HI).text.startswith("<|im_start|>user\nHi")
        assert not slow.done()
        with pytest.raises(Unrenderable, match="more time than"):
            slow.result()


def test_a_template_that_was_forgotten_is_sent_again() -> None:
    """A process keeps those that were used last."""
    templates = [ChatTemplate(f"{number}{{{{ messages[0].content }}}}") for number in range(40)]
    for _ in range(2):
        for number, template in enumerate(templates):
            assert template.render(HI).text == f"{number}Hi"


def test_a_process_that_was_killed_is_replaced() -> None:
    """Also while it waits; the next request does not notice."""
    template = ChatTemplate(CHATML)
    template.check()
    for process in renderer()._idle:
        process.worker._kill(process.worker._number)
    template.check()


def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it keeps none of its own limits."""
    waited_s: list[float] = []

    class Never(Future[bytes]):
        def result(self, timeout: float | None = None) -> bytes:
            waited_s.append(timeout or math.inf)
            raise TimeoutError

    monkeypatch.setattr(Worker, "ask", lambda _worker, _payload: Never())
    with pytest.raises(NotRendered, match="not rendered in time"):
        ChatTemplate(CHATML).render(HI)
    assert waited_s[0] < 120


def test_jinja2_is_not_imported_by_the_daemon() -> None:
    """Templates are foreign code, and jinja2 takes megabytes."""
    code = "import sys, uma_trio.app.daemon; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STRICT = chatml(
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}{{ m.content }}"
)
LATER_SYSTEM: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "b"},
    {"role": "user", "content": "c"},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apply-template", {"messages": LATER_SYSTEM}),
        ("/v1/chat/completions", {"messages": LATER_SYSTEM, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": LATER_SYSTEM, "max_tokens": 4, "stream": True}),
        ("/api/chat", {"messages": LATER_SYSTEM, "stream": False, "options": {"num_predict": 4}}),
    ],
    ids=["apply-template", "chat", "stream", "ollama"],
)
async def test_a_header_says_what_was_reshaped(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    """Of a conversation that the template refuses, and of no other one."""
    backend = ScriptedBackend([list(b"ok")], chat_template=STRICT, cost=linear_cost(0.01, 0.0))
    async with http_house(backend=backend) as daemon:
        answer = await daemon.ask("POST", path, {"model": "x", **body})
        assert answer.status == 200, answer.body
        assert answer.headers["x-uma-reshaped"] == "system-to-user"
        plain = await daemon.ask("POST", path, {"model": "x", **body, "messages": LATER_SYSTEM[2:]})
        assert "x-uma-reshaped" not in plain.headers
        counted = await daemon.ask(
            "POST", "/v1/chat/completions/input_tokens", {"messages": LATER_SYSTEM}
        )
        assert counted.status == 200
