"""Flags of other servers, typed by habit, are answered with ours."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from attrs import fields

from uma_trio.cli.answer_flags import AnswerFlags
from uma_trio.cli.foreign import TABLES, Meant, suggestion
from uma_trio.cli.run import Asking
from uma_trio.config.options import OPTIONS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "8080"], "Use --http 8080:"),
        (["--port=8080"], "Use --http 8080:"),
        (["--port", "8080", "--host", "0.0.0.0"], "Use --http 0.0.0.0:8080:"),  # noqa: S104
        (["--host", "::1", "--port=80"], "Use --http '[::1]:80':"),
        (["--host", "localhost"], "Use --http localhost:PORT:"),
        (["-m", "a b.gguf"], "Use --model 'a b.gguf':"),
        (["-m"], "Use --model:"),
        (["-c", "8192"], "Use --n-ctx 8192:"),
        (["-ngl", "99"], "Use --gpu-layers 99:"),
        (["-np", "4"], "Use --parallel 4:"),
        (["-t", "8"], "Use --threads 8:"),
        (["-v", "-m", "x"], "Use --log-level debug:"),
        (["-hf", "owner/repo"], "uma-trio pull owner/repo"),
        (["--jinja"], "always on"),
    ],
)
def test_a_flag_of_llama_server_is_answered_with_ours(arguments: list[str], said: str) -> None:
    """With the value that was typed behind it, to be copied."""
    assert said in suggestion("serve", arguments[0], ["serve", *arguments])


@pytest.mark.parametrize("flag", ["--mdoel", "--n-ct", ""])
def test_a_misspelling_is_left_to_who_knows_all_flags(flag: str) -> None:
    """The nearest name is a better answer there."""
    assert suggestion("serve", flag, ["serve", flag]) == ""
    assert suggestion("ps", "--port", ["ps", "--port"]) == ""


def _ours(verb: str) -> set[str]:
    if verb == "serve":
        return {item.flag for item in OPTIONS}
    flags = fields(Asking) if verb == "run" else fields(AnswerFlags)
    return {f"--{each.name.replace('_', '-')}" for each in flags}


@pytest.mark.parametrize("verb", TABLES)
def test_every_suggested_flag_is_one_of_the_verb_and_no_foreign_one_is(verb: str) -> None:
    """A table that suggests a flag which is gone would send people in a circle."""
    table: Mapping[str, Meant] = TABLES[verb]
    ours = _ours(verb)
    assert {meant.flag.split()[0] for meant in table.values() if meant.flag} <= ours
    assert not ours & table.keys()
