"""From what is asked to what the engine needs: rendered, tokenised and constrained in one call of a helper thread."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.text.constraint import Compiler, Constraint
from uma_trio.text.frontend import Chat, FrontEnd, Prepared, Prompt, Tokenised
from uma_trio.text.replying import NOTHING_LOOSENED, Loosened
from uma_trio.text.shape import Shape
from uma_trio.text.tokeniser import Whose


class Preparation:
    """One request being prepared: `n` answers to `prompt`, held to `shape`. Blocks; for one thread at a time.

    :meth:`finish` raises :class:`uma_trio.text.shape.Unknown` where a shape has to be compiled: then call
    :meth:`compile`, once a compiler is free, and `finish` again. Nothing is done twice. `field` is what
    was processed last, for messages.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        prompt: Prompt,
        *,
        shape: Shape | None = None,
        budget: int | None = None,
        n: int = 1,
        whose: Whose | None = None,
    ) -> None:
        self._front_end, self._prompt, self._whose = front_end, prompt, whose
        self._shape, self._budget, self._n = shape, budget, n
        self._chat = prompt if isinstance(prompt, Chat) else None
        self.field = "tools"
        has_tools = self._chat is not None and len(self._chat.tools) > 0
        self._loosened: Loosened | None = None if has_tools else NOTHING_LOOSENED
        self._read: Tokenised | None = None
        self._constraints: Sequence[Constraint | None] | None = None

    def finish(self) -> list[Prepared]:
        """Return what each answer needs. Raises `Unknown`, `Unconstrainable` or `Unrenderable`."""
        front_end, chat = self._front_end, self._chat
        if self._loosened is None:
            self._loosened = self._loosen(front_end.grammarian.known)
        if self._read is None:
            self._read = front_end.tokens_of(self._prompt, self._whose)
        (tokens, thinking, reshaped), loosened = self._read, self._loosened
        if self._constraints is None:
            self._constraints = (
                self._constrain(front_end.grammarian.known)
                if self._is_constrained(loosened)
                else [None] * self._n
            )
        if chat is None:
            return [Prepared(tokens, constraint) for constraint in self._constraints]
        found: list[Prepared] = []
        for constraint in self._constraints:
            parser = front_end.replies.parser(
                chat.tools, chat.choice, thinking=thinking, continued=chat.manner.continue_final
            )
            pieces = None if parser is None else front_end.replies.pieces
            names = loosened.names if self._shape is None else self._shape.loosened
            found.append(Prepared(tokens, constraint, parser, names, pieces, reshaped))
        return found

    def compile(self) -> None:
        """Compile what :meth:`finish` did not know. Raises :class:`uma_trio.text.shape.Unconstrainable`."""
        if self._loosened is None:
            self._loosened = self._loosen(self._front_end.grammarian)
        else:
            self._constraints = self._constrain(self._front_end.grammarian)

    def _is_constrained(self, loosened: Loosened) -> bool:
        if self._shape is not None or loosened.offers:
            return True
        return self._chat is not None and self._budget is not None

    def _loosen(self, compiler: Compiler) -> Loosened:
        if self._chat is None:
            return NOTHING_LOOSENED
        return self._front_end.replies.loosened(compiler, self._chat.tools, self._chat.choice)

    def _constrain(self, compiler: Compiler) -> list[Constraint | None]:
        shape, chat = self._shape, self._chat
        if shape is not None:
            self.field = shape.field
        if chat is None:
            return [None if shape is None else compiler.follow(shape) for _ in range(self._n)]
        thinking = self._read is not None and self._read[1]
        return [
            self._front_end.replies.constraint(
                *(compiler, shape, self._loosened or NOTHING_LOOSENED),
                *(chat.choice, self._budget),
                thinking=thinking,
            )
            for _ in range(self._n)
        ]
