"""Logs: readable, bounded, in nobody's way, and silent about what users write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import structlog

from uma_trio.observe import log


class Pipe:
    """A pipe whose reader may be slow or gone."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.open = {self.reader, self.writer}

    def text(self) -> str:
        """Return what has been written since."""
        parts = []
        while True:
            try:
                part = os.read(self.reader, 65536)
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode()

    def close(self, end: int) -> None:
        """Close one end, once."""
        if end in self.open:
            self.open.remove(end)
            os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Return a pipe to log into; the logger forgets it afterwards."""
    made = Pipe()
    yield made
    structlog.reset_defaults()
    made.close(made.reader)
    made.close(made.writer)


def test_a_line_for_people_has_time_level_part_and_values(pipe: Pipe) -> None:
    """What happened comes first, the values after it."""
    log.configure("info", json=False, fd=pipe.writer)
    log.get("engine").info("ready", slots=8, took_s=1.23456, path="a b")
    line = pipe.text()
    assert line.endswith("info    engine: ready  slots=8  took_s=1.235  path='a b'\n")


def test_a_line_for_machines_is_one_json_object(pipe: Pipe) -> None:
    """Where nobody reads along, every line can be parsed."""
    log.configure("info", fd=pipe.writer)
    log.get("net").warning("slow", peer=7)
    found = json.loads(pipe.text())
    assert (found["event"], found["level"], found["part"], found["peer"]) == (
        *("slow", "warning", "net"),
        7,
    )


def test_lines_below_the_level_are_not_written(pipe: Pipe) -> None:
    """By default a log is short."""
    log.configure("warning", fd=pipe.writer)
    log.get("net").info("connected")
    assert pipe.text() == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_what_a_user_wrote_is_withheld(pipe: Pipe, as_json: bool) -> None:
    """Even a careless call does not put a prompt into the log."""
    log.configure("debug", json=as_json, fd=pipe.writer)
    log.get("net").debug("request", prompt="my secret", messages=["my secret"])
    line = pipe.text()
    assert "secret" not in line
    assert "withheld" in line


def test_a_full_pipe_costs_lines_and_not_time(pipe: Pipe) -> None:
    """A reader that sleeps loses lines; the next one it gets says how many."""
    log.configure("info", json=False, fd=pipe.writer)
    logger = log.get("engine")
    for number in range(3000):
        logger.info("tick", number=number)
    held = pipe.text().splitlines()
    assert 0 < len(held) < 3000
    logger.info("after")
    assert f"({3000 - len(held)} lines dropped)" in pipe.text()


def test_a_reader_that_left_breaks_nothing(pipe: Pipe) -> None:
    """A closed pipe is not an error of the daemon."""
    log.configure("info", fd=pipe.writer)
    pipe.close(pipe.reader)
    log.get("engine").error("nobody hears this")


def test_a_line_is_bounded(pipe: Pipe) -> None:
    """No value can make one write block on a pipe."""
    log.configure("info", json=False, fd=pipe.writer)
    log.get("engine").info("big", value="x" * 100_000)
    assert len(pipe.text()) <= log.PIPE_BUF


def test_an_exception_is_logged_with_its_traceback(pipe: Pipe) -> None:
    """Who has to find the fault sees where it was."""
    log.configure("info", json=False, fd=pipe.writer)
    try:
        raise KeyError("lost")
    except KeyError:
        log.get("engine").exception("failed")
    assert "KeyError: 'lost'" in pipe.text()
