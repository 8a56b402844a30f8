"""The page in Firefox, against a real daemon on the fake model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_http_sdk import served

pytestmark = pytest.mark.daemon

VISIT = Path(__file__).with_name("page_firefox.mjs")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
MODULES = Path(os.environ.get("UMA_SDK_NODE") or Path(sys.prefix) / "node") / "node_modules"
ANSWER = "```js\nlet x;\n```\n$x^2$ <img src=x onerror=window.hit=1>\n\n| a |\n|--:|\n| 1 |"


@pytest.mark.skipif(FIREFOX is None, reason="there is no Firefox: apt-get install firefox-esr")
@pytest.mark.skipif(
    shutil.which("node") is None or not (MODULES / "puppeteer-core").exists(),
    reason="puppeteer-core is not installed: make setup-test",
)
def test_the_page_in_firefox(tmp_path: Path) -> None:
    """An answer with code and a formula, versions, a reload, the dark theme, and no serious violation that axe finds."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([ANSWER]), encoding="utf-8")
    with served(script=str(script)) as address:
        done = subprocess.run(
            ["node", VISIT, str(FIREFOX), address, MODULES],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-3000:]
