"""The prefix cache over the wire: cached tokens, whose they are, and `uma-trio prefix`."""

from __future__ import annotations

import msgspec
import pytest
from net_kit import house
from trio.testing import MockClock

from uma_protocol import Eos, Error, Explain, Explanation, Generate, Prefix, Prefixes, PrefixInfo
from uma_trio.cli.prefix import lines_of
from uma_trio.cli.prefix import prefix as prefix_verb

MIB = 1 << 20
LONG = "Once upon a time there was a fox who had a lantern. " * 4


async def test_usage_tells_what_was_cached(autojump_clock: MockClock) -> None:
    """The second request of the same user begins with the first one's prompt."""
    async with house(prefix_bytes=MIB) as daemon:
        client = daemon.connect()
        for cached in (0, len(LONG)):
            await client.send(Generate(id="a", prompt=LONG, max_tokens=3))
            eos = await client.until(Eos)
            assert eos.usage.cached_tokens == cached, "all but the last token"
        await client.send(Explain(request=eos.request))
        (story,) = (await client.until(Explanation)).requests
        assert story.beginning is not None
        assert (story.beginning.tokens, story.beginning.source) == (len(LONG), "leaf")


async def test_a_salt_is_another_namespace(autojump_clock: MockClock) -> None:
    """What was computed without it is not used, and the next one with it is."""
    async with house(prefix_bytes=MIB) as daemon:
        client = daemon.connect()
        for cache, hit in ((None, False), ("x", False), ("x", True), ("private", False)):
            await client.send(Generate(id="a", prompt=LONG, max_tokens=3, cache=cache))
            assert ((await client.until(Eos)).usage.cached_tokens > 0) is hit


async def test_prefixes_are_listed_and_cleared(autojump_clock: MockClock) -> None:
    """By namespace, with the user's name left out; after clear nothing is there."""
    async with house(prefix_bytes=MIB) as daemon:
        client = daemon.connect()
        for cache in (None, "x"):
            await client.send(Generate(id="a", prompt=LONG, max_tokens=3, cache=cache))
            await client.until(Eos)
        await client.send(Prefix())
        found = await client.until(Prefixes)
        assert [info.cache for info in found.prefixes] == [None, "salt x"]
        assert all(info.leaf_tokens > len(LONG) for info in found.prefixes)
        assert found.budget_bytes == MIB
        await client.send(Prefix(action="clear"))
        found = await client.until(Prefixes)
        assert found.prefixes == ()
        assert found.dropped > 2 * len(LONG)
        assert daemon.backend.kv_used() == 0


async def test_what_is_cleared_is_given_back_to_the_system(autojump_clock: MockClock) -> None:
    """Before the answer, so that who looks then sees it; a list gives nothing back."""
    async with house(prefix_bytes=MIB) as daemon:
        client = daemon.connect()
        for n, action in enumerate(("list", "clear")):
            await client.send(Prefix(action=action))
            await client.until(Prefixes)
            assert daemon.recorder.trims == n


async def test_a_session_is_pinned_by_its_name(autojump_clock: MockClock) -> None:
    """Once its latest turn is saved; a pin without a session says what is missing."""
    async with house(prefix_bytes=MIB) as daemon:
        client, engine = daemon.connect(), daemon.bench.engine
        await client.send(Generate(id="a", prompt=LONG, max_tokens=3, session="s"))
        await client.until(Eos)
        while engine.cells.prefix.saving.one():
            pass
        await client.send(Prefix(action="pin", session="s", seconds=60))
        (info,) = (await client.until(Prefixes)).prefixes
        assert info.sessions == ("s",)
        store = engine.cells.prefix.store
        (name,) = store.trie.namespaces
        assert all(page.pinned_until > 59 for page in store.trie.pages(name))
        await client.send(Prefix(action="pin"))
        error = await client.until(Error)
        assert error.code == "E_PROTO_003"
        assert "session" in error.message


def test_what_is_kept_is_told_in_lines() -> None:
    """A head for all, then a line for each namespace."""
    info = PrefixInfo(pages=2, tokens=1000, bytes=500, leaf_tokens=7, sessions=("s\x1b",))
    lines = lines_of(Prefixes(MIB, 600, (info,), dropped=9), cleared=True)
    assert lines[0] == "Cleared: 9 tokens of the KV cache."
    assert lines[2].startswith("all your programs: 1,000 tokens saved in 2 pages")
    assert "\x1b" not in lines[2]
    assert lines_of(Prefixes(0, 0)) == [
        "No prefixes are kept: the daemon runs with --prefix-ram 0."
    ]


def test_what_is_on_disk_is_told() -> None:
    found = Prefixes(
        MIB, 600, disk_budget_bytes=8 * 10**9, disk_used_bytes=2 * 10**6, disk_bytes=10**6
    )
    assert lines_of(found)[1] == "On disk 2 MB of 8 GB are used, 1 MB by you."


def test_what_more_memory_would_have_saved_is_told() -> None:
    """In parts of the prompt tokens that came."""
    info = PrefixInfo(
        pages=2, tokens=128, bytes=500, leaf_tokens=0, asked_tokens=2000, cached_tokens=500
    )
    (_, line) = lines_of(Prefixes(MIB, 600, (info,)))
    assert line.endswith("25% of 2,000 prompt tokens were cached")
    (_, line) = lines_of(Prefixes(MIB, 600, (msgspec.structs.replace(info, missed_tokens=280),)))
    assert line.endswith("twice the --prefix-ram would have cached 14% more")


@pytest.mark.parametrize(
    ("action", "session", "seconds"), [("pin", None, 300), ("list", "s", 300), ("pin", "s", -1)]
)
def test_a_wrong_use_of_the_verb_is_refused(
    action: str, session: str | None, seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any daemon is asked."""
    assert prefix_verb(action, session, seconds=seconds) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().err
