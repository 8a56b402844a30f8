"""The table of codes and the exceptions that carry them."""

import pytest

from uma_protocol import (
    CODES,
    Code,
    Fatality,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)


def test_every_code_is_declared():
    """A code without a meaning cannot exist."""
    assert list(CODES) == list(Code)


@pytest.mark.parametrize("code", Code)
def test_a_code_says_what_to_do_next(code):
    """Each code has a title and a next step, both written to follow other words."""
    info = CODES[code]
    assert info.title
    assert info.action
    assert not info.action.endswith(".")


def test_the_table_of_codes_cannot_be_changed():
    """Nobody adds a code at run time."""
    with pytest.raises(TypeError):
        CODES[Code.E_PROTO_001] = CODES[Code.E_PROTO_002]


@pytest.mark.parametrize(
    ("fatality", "idle", "busy"),
    [
        (Fatality.ALWAYS, True, True),
        (Fatality.WHEN_IDLE, True, False),
        (Fatality.NEVER, False, False),
        (Fatality.TERMINAL, False, False),
    ],
)
def test_fatality_depends_on_whether_a_request_runs(fatality, idle, busy):
    """Only WHEN_IDLE looks at the connection."""
    assert (fatality.ends(idle=True), fatality.ends(idle=False)) == (idle, busy)


def test_the_common_exception_cannot_be_raised():
    """Somebody is always at fault, so the base class refuses to exist."""
    with pytest.raises(TypeError, match="LocalProtocolError or RemoteProtocolError"):
        ProtocolError(Code.E_PROTO_001, "whose fault?")


@pytest.mark.parametrize("kind", [LocalProtocolError, RemoteProtocolError])
def test_an_error_carries_all_that_is_known(kind):
    """Code, message, field, request and fatality can be read from the exception."""
    error = kind(Code.E_PROTO_003, "no", field="seed", request_id="a", fatal=True)
    assert isinstance(error, ProtocolError)
    assert (error.code, error.message, error.field) == (Code.E_PROTO_003, "no", "seed")
    assert (error.request_id, error.fatal) == ("a", True)
    assert str(error) == "E_PROTO_003: no"
