"""TextOwner computed prompts a request may use: its principal's, narrowed by what it asks for."""

from __future__ import annotations

import string

from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from uma_trio.api.api import sharing_of
from uma_trio.api.bodies import TextBody
from uma_trio.engine.messages import SamplingParams
from uma_trio.service.ask import Ask, Door, Origin, Salt, Sharing, namespace
from uma_trio.service.fair import MAX_CHILDREN, Shares
from uma_trio.sockets.principal import Principal

DOOR = Door(max_prompt_bytes=100)

# What could be taken for another's name, among texts of all sorts.
NAMES = st.one_of(
    st.sampled_from(
        [
            "private",
            "user",
            "none",
            "uid 1",
            "uid 1/salt x",
            "../uid 2",
            "key 1",
            "connection 1",
            "/",
        ]
    ),
    st.text(max_size=8),
    st.text(string.digits + "/ uidkeyconnection", max_size=12),
)
SHARINGS = st.one_of(st.sampled_from(["user", "private", "none"]), st.builds(Salt, NAMES))
SMALL = st.integers(0, 12)
PRINCIPALS = st.builds(
    Principal,
    connection=SMALL,
    host=st.sampled_from(["", "127.0.0.1", "::1", "10.0.0.7"]),
    uid=st.none() | SMALL,
    pid=st.none() | SMALL,
    key=st.none() | SMALL,
    has_token=st.booleans(),
    is_forwarded=st.booleans(),
    is_operator=st.booleans(),
)


def of(
    cache: Sharing = "user",
    uid: int | None = 1000,
    pid: int = 7,
    key: int | None = None,
    together: int = 1,
) -> str:
    """Return the namespace of a request of this origin."""
    principal = Principal(connection=pid, uid=uid, pid=None if uid is None else pid, key=key)
    found = namespace(
        Ask(prompt="p", cache=cache), Origin(principal=principal, door=DOOR, name="r"), together
    )
    return found or "nowhere"


@given(PRINCIPALS, PRINCIPALS, SHARINGS, SHARINGS, NAMES, NAMES)
def test_two_principals_never_share(
    one: Principal, other: Principal, mine: Sharing, theirs: Sharing, app: str, name: str
) -> None:
    """Whatever they call themselves, and whatever they ask of the cache. Nor does one own the other's."""
    assume(one.shares_as != other.shares_as)
    first = namespace(
        Ask(prompt="p", cache=mine), Origin(principal=one, door=DOOR, name=name, app=app), 1
    )
    second = namespace(
        Ask(prompt="p", cache=theirs, session=name),
        Origin(principal=other, door=DOOR, name=name, app=app),
        1,
    )
    assert first is None or first != second
    assert second is None or not one.owns(second)
    assert first is None or one.owns(first)


@given(PRINCIPALS, SHARINGS, SHARINGS)
def test_what_is_asked_of_the_cache_is_not_mixed_up(
    principal: Principal, one: Sharing, other: Sharing
) -> None:
    """A salt is neither the principal at large nor its private namespace, whatever the salt says."""
    assume(one != other)
    origin = Origin(principal=principal, door=DOOR, name="r")
    first = namespace(Ask(prompt="p", cache=one), origin, 1)
    assert first is None or first != namespace(Ask(prompt="p", cache=other), origin, 1)


def test_processes_of_one_user_share() -> None:
    """Unless they ask for less, on whatever connection."""
    assert of(pid=7) == of(pid=8)
    assert of(uid=1000) != of(uid=1001)


def test_private_is_the_processs_own() -> None:
    """Another process of the same user has another one, and so has the user at large."""
    assert len({of("private", pid=7), of("private", pid=8), of()}) == 3
    assert of("private") == of("private")


def test_a_salt_is_shared_with_who_gives_it() -> None:
    """Within one user, whatever the salt says."""
    assert of(Salt("x"), pid=7) == of(Salt("x"), pid=8)
    assert of(Salt("x")) != of(Salt("y"))
    assert of(Salt("x")) != of(Salt("x"), uid=1001)


def test_a_key_is_a_user_of_its_own() -> None:
    """On any connection, and whoever connected."""
    assert of(key=1, uid=1000) == of(key=1, uid=1001) != of(key=2)
    assert of(key=1, uid=1000) != of(uid=1000)


def test_without_a_user_each_connection_is_alone() -> None:
    """As where the system does not tell who connects."""
    assert of(uid=None, pid=1) != of(uid=None, pid=2)


def test_cache_prompt_false_shares_with_no_other_request() -> None:
    """Also not with a salt."""
    asked = sharing_of(TextBody(cache_prompt=False, cache_salt="x"))
    assert asked == "none"
    assert of(asked, together=1) != of(asked, together=2)


def test_the_salt_private_over_http_is_that_text() -> None:
    """The word is the protocol's, for a process; HTTP's salts are texts."""
    asked = sharing_of(TextBody(cache_salt="private"))
    assert asked == Salt("private")
    assert of(asked, pid=7) == of(asked, pid=8) != of("private", pid=7)


def test_a_scored_prompt_has_no_namespace() -> None:
    """What is cached has no logits to score with."""
    scored = evolve(SamplingParams(), prompt_logprobs=0)
    origin = Origin(principal=Principal(connection=1, uid=1), door=DOOR, name="r")
    assert namespace(Ask(prompt="p", sampling=scored), origin, 1) is None


# --- machine time ---


def path(
    principal: Principal, app: str | None = None, session: str | None = None
) -> tuple[int, ...]:
    """Return the shares of the first request of a daemon's life; for comparisons use one `Shares`."""
    return SHARES.path(Origin(principal=principal, door=DOOR, name="r", app=app), session)


SHARES = Shares()


@given(PRINCIPALS, PRINCIPALS, NAMES, NAMES)
def test_names_divide_a_principals_share_and_never_join_two(
    one: Principal, other: Principal, app: str, session: str
) -> None:
    """The first number is the principal's, whatever it says; no number belongs to two."""
    mine, theirs = path(one, app, session), path(other, app, session)
    if one.counts_as == other.counts_as:
        assert mine[0] == theirs[0]
    else:
        assert not {*mine} & {*theirs}
    assert path(one, app, session) == mine
    assert path(one)[0] == mine[0]


def test_the_same_user_counts_once_on_every_transport() -> None:
    """A process on the socket and a connection on the port are the same principal."""
    by_socket = Principal(connection=1, uid=1000, pid=7)
    by_port = Principal(connection=2, host="127.0.0.1", uid=1000)
    assert path(by_socket)[0] == path(by_port)[0]
    assert by_socket.shares_as == by_port.shares_as


def test_unknown_users_of_an_address_count_as_one() -> None:
    """Many connections are not many shares, although none of them sees the other's prompts."""
    one, other = (Principal(connection=n, host="127.0.0.1") for n in (1, 2))
    assert path(one)[0] == path(other)[0]
    assert one.shares_as != other.shares_as


def test_a_thousand_names_forget_only_those_of_their_principal() -> None:
    """Their own numbers change, the principal's and everybody else's stay."""
    shares = Shares()

    def of_user(uid: int, app: str) -> tuple[int, ...]:
        principal = Principal(connection=1, uid=uid)
        return shares.path(Origin(principal=principal, door=DOOR, name="r", app=app), None)

    quiet, first = of_user(1, "editor"), of_user(2, "0")
    for i in range(MAX_CHILDREN + 1):
        of_user(2, str(i + 1))
    assert of_user(1, "editor") == quiet
    again = of_user(2, "0")
    assert again[0] == first[0]
    assert again[1] != first[1]
