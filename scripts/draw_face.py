"""Draw docs/images/page.png and docs/images/top.svg: the page and `uma-trio top` beside a few programs.

Needs the extra `browser` and a Chromium; starts a daemon of its own on the bundled model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
STORY = "Once upon a time there was a fox who had a lantern. "
PROGRAMS = (
    ("editor", "interactive", 2, 400),
    ("terminal", "interactive", 3, 400),
    ("nightly batch", "background", 60, 80),
    ("agent", "interactive", 40, 200),
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
LOOKS = 40  # at most, for a second in which readers get what is promised


@contextmanager
def daemon(folder: str) -> Iterator[tuple[str, int]]:
    """Serve the bundled model; yield its socket and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = f"{folder}/s"
    command = [sys.executable, "-m", "uma_trio", "serve", "--socket", path, "--parallel", "4"]
    with subprocess.Popen(
        [*command, "--http", str(port)], stdout=subprocess.PIPE, text=True
    ) as found:
        try:
            for line in found.stdout or ():
                if "Ctrl-C" in line:
                    break
            yield path, port
        finally:
            found.terminate()


def ask(port: int, app: str, lane: str, length: int, n: int, ends: threading.Event) -> None:
    """Ask again and again for a story, as a program that streams."""
    turn = 0
    while not ends.is_set():
        turn += 1
        prompt = f"{turn} {STORY * length}Tell me a story about a fox and a lantern"
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": n, "stream": True}
        named = {"Content-Type": "application/json", "X-UMA-App": app, "X-UMA-Priority": lane}
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), named)
        answer = connection.getresponse()
        while not ends.is_set() and answer.readline():
            pass
        connection.close()


def page(port: int) -> None:
    """Take the picture of the page."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        tab = browser.new_page(viewport={"width": 1280, "height": 860})
        tab.goto(f"http://127.0.0.1:{port}/ui/#/batch")
        tab.wait_for_timeout(5000)
        for _ in range(LOOKS):
            if tab.locator(".meter[role=meter]:not(.late)").count():
                break
            tab.wait_for_timeout(500)
        tab.screenshot(path=IMAGES / "page.png")
        browser.close()


def top(path: str) -> None:
    """Take the picture of the terminal."""
    from rich.console import Console
    from rich.text import Text

    for _ in range(LOOKS):
        command = [sys.executable, "-m", "uma_trio", "top", "--once", "--socket", path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        share = told.splitlines()[1].split()
        if "of" in share and float(share[2]) <= float(share[4]):
            break
        time.sleep(0.3)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        drawn = Console(record=True, width=110, file=nowhere)
        drawn.print(Text(told), overflow="ellipsis", no_wrap=True)
    svg = drawn.export_svg(title="uma-trio top")
    # A picture in a document fetches no fonts.
    (IMAGES / "top.svg").write_text(
        re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), "utf-8"
    )


def main() -> None:
    """Draw both."""
    ends = threading.Event()
    with tempfile.TemporaryDirectory() as folder, daemon(folder) as (path, port):
        asking = [threading.Thread(target=ask, args=(port, *program, ends)) for program in PROGRAMS]
        for one in asking:
            one.start()
        try:
            page(port)
            top(path)
        finally:
            ends.set()
            for one in asking:
                one.join()


if __name__ == "__main__":
    main()
