"""The tables, cell by cell, and the class that looks them up."""

import pytest

from uma_protocol import ClientState, Code, Input, LocalProtocolError, Role, ServerState
from uma_protocol.states import (
    CLIENT,
    GUARDED,
    IMPLIED,
    INITIAL,
    INVISIBLE,
    SERVER,
    TABLES,
    StateMachine,
)

# Written by hand from the design, in another shape than the tables, so that a slip in one of the
# two shows. A dot is an input that is not allowed.
GRID = {
    Role.SERVER: """
            HELLO    REQUEST ADMIN    REPLY    PROMPT_DONE TOKEN  END     RESULT  LOADING FLUSHED    EOS  NEXT_CYCLE FATAL BREAK
 RECV_HELLO RECV_REQ .       .        .        .           .      .       .       .       RECV_HELLO .    .          ERROR ERROR
 RECV_REQ   RECV_REQ PREFILL RECV_REQ RECV_REQ .           .      .       .       .       RECV_REQ   .    .          ERROR ERROR
 PREFILL    .        .       PREFILL  PREFILL  DECODE      .      PREFILL PREFILL PREFILL PREFILL    DONE .          ERROR ERROR
 DECODE     .        .       DECODE   DECODE   .           STREAM STREAM  .       .       DECODE     DONE .          ERROR ERROR
 STREAM     .        .       STREAM   STREAM   .           STREAM STREAM  .       .       DECODE     DONE .          ERROR ERROR
 DONE       .        .       DONE     DONE     .           .      .       .       .       DONE       .    RECV_REQ   ERROR ERROR
 ERROR      .        .       .        .        .           .      .       .       .       ERROR      .    .          ERROR ERROR
""",
    Role.CLIENT: """
            HELLO    REQUEST ADMIN     REPLY    PROMPT_DONE TOKEN END   RESULT LOADING FLUSHED EOS NEXT_CYCLE FATAL BREAK
 SEND_HELLO SEND_REQ .       .         .         . .         .         .     .     . .    .        ERROR ERROR
 SEND_REQ   SEND_REQ AWAIT   SEND_REQ  SEND_REQ  . .         .         .     .     . .    .        ERROR ERROR
 AWAIT      .        .       AWAIT     AWAIT     . STREAMING AWAIT     AWAIT AWAIT . DONE .        ERROR ERROR
 STREAMING  .        .       STREAMING STREAMING . STREAMING STREAMING .     .     . DONE .        ERROR ERROR
 DONE       .        .       DONE      DONE      . .         .         .     .     . .    SEND_REQ ERROR ERROR
 ERROR      .        .       .         .         . .         .         .     .     . .    .        .     ERROR
""",
}
STATES = {Role.SERVER: ServerState, Role.CLIENT: ClientState}


def _cells():
    for role, grid in GRID.items():
        head, *rows = [line.split() for line in grid.strip().splitlines()]
        for name, *targets in rows:
            for label, target in zip(head, targets, strict=True):
                state = STATES[role][name]
                yield pytest.param(
                    role,
                    state,
                    Input[label],
                    None if target == "." else STATES[role][target],
                    id=f"{role.value}-{name}-{label}",
                )


CELLS = list(_cells())


def test_the_grid_covers_every_state_and_input():
    """No cell of either table is left untested."""
    tested = [cell.values[:3] for cell in CELLS]
    assert len(tested) == len(set(tested)) == (len(ServerState) + len(ClientState)) * len(Input)


@pytest.mark.parametrize(("role", "state", "happened", "target"), CELLS)
def test_every_cell(role, state, happened, target):
    """Each input leads to its one state, or is refused and changes nothing."""
    machine = StateMachine(role)
    machine.state = state
    assert machine.allows(happened) is (target is not None)
    if target is None:
        with pytest.raises(LocalProtocolError) as caught:
            machine.feed(happened)
        assert caught.value.code is Code.E_RUNTIME_004
        assert state.name in caught.value.message
        assert machine.state is state
    else:
        machine.feed(happened)
        assert machine.state is target


@pytest.mark.parametrize("role", Role)
def test_every_state_can_be_reached(role):
    """Each state but the first one is the target of a cell that starts elsewhere."""
    reached = {target for (state, _), target in TABLES[role].items() if state is not target}
    assert reached | {INITIAL[role], GUARDED[role]} == set(STATES[role])


@pytest.mark.parametrize("role", Role)
def test_nothing_leaves_error(role):
    """ERROR is for good."""
    targets = {target for (state, _), target in TABLES[role].items() if state.name == "ERROR"}
    assert {target.name for target in targets} == {"ERROR"}


def test_a_token_before_the_prompt_is_done_has_no_cell():
    """The classic fault of chunked prefill cannot be expressed."""
    assert (ServerState.PREFILL, Input.TOKEN) not in SERVER


def test_a_mirror_concludes_that_the_prompt_is_done():
    """A client that sees a token knows what happened before it."""
    mirror = StateMachine(Role.SERVER)
    mirror.infer(Input.REQUEST)
    mirror.infer(Input.TOKEN)
    assert mirror.state is ServerState.STREAM


def test_what_is_implied_is_invisible():
    """Only inputs that no byte shows need to be concluded."""
    assert set(IMPLIED.values()) <= INVISIBLE


@pytest.mark.parametrize("table", [SERVER, CLIENT])
def test_tables_cannot_be_changed(table):
    """The tables are data for everybody and property of nobody."""
    with pytest.raises(TypeError):
        table[ServerState.ERROR, Input.REQUEST] = ServerState.PREFILL
