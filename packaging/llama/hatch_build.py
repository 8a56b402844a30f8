"""What hatchling puts into the wheel besides the package: what `llama_build` compiled, and its tag."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
# Beside this file in a source distribution, in the checkout's scripts/ otherwise.
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "scripts")]

import llama_build  # noqa: E402 - hatchling loads this file alone


class CompiledLlama(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles llama.cpp before a wheel is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the binding, the libraries and the licences; say which platform they are for."""
        if self.target_name != "wheel":
            return
        home = os.environ.get("UMA_TRIO_LLAMA_BUILD")
        made = llama_build.build(
            Path(home) if home else Path(self.directory) / "llama",
            os.environ.get("UMA_TRIO_LLAMA_VARIANTS", "").split(),
        )
        for file in sorted(made.rglob("*")):
            if file.is_file():
                inside = Path("uma_trio_llama") / file.relative_to(made)
                build_data["force_include"][str(file)] = str(inside)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{llama_build.platform_tag(made / 'lib')}"
