"""The turns of a conversation that comes in smaller pieces than messages. Pure.

Responses sends items, Messages sends blocks; chat templates know messages, and many of them take one
system message at the beginning and turns that alternate. So what one side says without a word
between from the other is one message, and what an agent says to the model in the middle of a
conversation comes from the user. A turn that was sent before is rendered as before, so that what was
computed of it stays of use.
"""

from __future__ import annotations

from attrs import define, field

from uma_trio.service.ask import Call, Message

_BETWEEN = "\n\n"
UNSEEN = "[This part of the result is no text, and cannot be shown to you.]"
"""What the model reads of a picture that a tool brought: refused, it would end an agent's session."""


@define
class _Turn:
    role: str
    texts: list[str] = field(factory=list)
    thoughts: list[str] = field(factory=list)
    calls: list[Call] = field(factory=list)

    def message(self) -> Message:
        return Message(
            self.role,
            _BETWEEN.join(self.texts),
            calls=tuple(self.calls),
            reasoning="\n".join(self.thoughts),
        )


class Turns:
    """Takes what was said, piece by piece, and gives the messages."""

    def __init__(self) -> None:
        self._system: list[str] = []
        self._turns: list[_Turn | Message] = []
        self._names: dict[str, str] = {}  # of tools, by the call

    def system(self, text: str) -> None:
        """Take a word of the application: before the first turn the system's, later the user's."""
        if self._turns:
            self.user(text)
        elif text:
            self._system.append(text)

    def user(self, text: str) -> None:
        """Take what the user says."""
        self._turn("user").texts.append(text)

    def summary(self, text: str) -> None:
        """Take a summary that stands for the conversation before it."""
        self.user(f"This is a summary of the conversation so far:\n\n{text}")

    def assistant(self, text: str) -> None:
        """Take what the model said."""
        if text:
            self._turn("assistant").texts.append(text)

    def thought(self, text: str) -> None:
        """Take what the model thought, before what it said then."""
        if text:
            self._turn("assistant").thoughts.append(text)

    def call(self, call: Call) -> None:
        """Take a call that the model made."""
        self._turn("assistant").calls.append(call)
        self._names[call.id] = call.name

    def result(self, call_id: str, text: str) -> None:
        """Take what a call brought."""
        name = self._names.get(call_id)
        self._turns.append(Message("tool", text, call_id=call_id, name=name))

    def messages(self) -> tuple[Message, ...]:
        """Return the messages. A thought that nothing was said or done behind is left out."""
        found = [Message("system", _BETWEEN.join(self._system))] if self._system else []
        for turn in self._turns:
            if isinstance(turn, Message):
                found.append(turn)
            elif turn.role != "assistant" or turn.texts or turn.calls:
                found.append(turn.message())
        return tuple(found)

    def _turn(self, role: str) -> _Turn:
        """Return the turn that is going on if it is this side's, else a new one."""
        last = self._turns[-1] if self._turns else None
        if not isinstance(last, _Turn) or last.role != role:
            last = _Turn(role)
            self._turns.append(last)
        return last
