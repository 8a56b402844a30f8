"""Whose computed prompts a request may use: the kernel's user id first, then the `cache` field."""

from __future__ import annotations

from uma_trio.service.ask import Ask, Door, Origin, namespace

DOOR = Door(max_prompt_bytes=100)


def of(cache: str | None = None, uid: int | None = 1000, client: int = 7) -> str:
    """Return the namespace of a request of this origin."""
    origin = Origin(client=client, door=DOOR, name="r", uid=uid, pid=client)
    return namespace(Ask(prompt="p", cache=cache), origin)


def test_processes_of_one_user_share() -> None:
    """Unless they ask for less."""
    assert of(client=7) == of(client=8)
    assert of(uid=1000) != of(uid=1001)


def test_private_is_the_processs_own() -> None:
    """Another process of the same user has another one, and so has the user at large."""
    assert len({of("private", client=7), of("private", client=8), of()}) == 3
    assert of("private") == of("private")


def test_a_salt_is_shared_with_who_gives_it() -> None:
    """Within one user, whatever the salt says."""
    assert of("x", client=7) == of("x", client=8)
    assert of("x") != of("y")
    assert of("x") != of("x", uid=1001)
    assert of("uid 1001", uid=1000) != of(uid=1001)


def test_a_salt_cannot_be_taken_for_a_private_namespace() -> None:
    """Nor can another user's name be spelt in it."""
    assert of("7") != of("private", client=7)
    assert not of("../uid 1001", uid=1000).startswith("uid 1001")


def test_without_a_user_each_client_is_alone() -> None:
    """As with keys of which nobody knows whose they are."""
    assert of(uid=None, client=-1) != of(uid=None, client=-2)
