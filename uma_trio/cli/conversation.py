"""A conversation as `uma-trio chat` keeps it, and the commands that change it. Does no output."""

from __future__ import annotations

import json
from pathlib import Path

Turn = tuple[str, str]  # role, content


class Conversation:
    """The turns so far, with at most one system message before them."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[Turn] = []

    @property
    def messages(self) -> list[Turn]:
        """What the model is sent."""
        return [("system", self.system), *self.turns] if self.system else list(self.turns)

    def ask(self, text: str) -> None:
        """Add a question. One that got no answer is replaced, since templates want turns to alternate."""
        if self.turns and self.turns[-1][0] == "user":
            self.turns.pop()
        self.turns.append(("user", text))

    def answered(self, text: str) -> None:
        """Add an answer, or what has come of it; an empty one leaves the question open."""
        if text:
            self.turns.append(("assistant", text))

    @property
    def goes_on(self) -> bool:
        """Whether the latest turn is an answer, which could be continued."""
        return bool(self.turns) and self.turns[-1][0] == "assistant"

    def continued(self, text: str) -> None:
        """Add to the latest answer."""
        role, content = self.turns[-1]
        self.turns[-1] = (role, content + text)

    def again(self) -> bool:
        """Take back what answers the latest question; False, and nothing else, if there is no question."""
        asked = [n for n, (role, _) in enumerate(self.turns) if role == "user"]
        if asked:
            del self.turns[asked[-1] + 1 :]
        return bool(asked)

    def clear(self) -> None:
        """Forget every turn, and keep the system message."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the conversation: messages as JSON, or as Markdown if the name ends in .md.

        Raises:
            OSError: the file cannot be written.
        """
        if path.suffix.lower() == ".md":
            text = "".join(f"## {role}\n\n{content}\n\n" for role, content in self.messages)
        else:
            said = [{"role": role, "content": content} for role, content in self.messages]
            text = json.dumps(said, ensure_ascii=False, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")

    def load(self, path: Path) -> None:
        """Take up a conversation that :meth:`save` wrote as JSON.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is none; the conversation is unchanged.
        """
        said = json.loads(path.read_text(encoding="utf-8"))
        try:
            turns = [(str(turn["role"]), str(turn["content"])) for turn in said]
        except (TypeError, KeyError):
            raise ValueError("a list of objects with role and content is expected") from None
        if any(role not in ("system", "user", "assistant") for role, _ in turns):
            raise ValueError("a role is system, user or assistant")
        self.system = turns[0][1] if turns and turns[0][0] == "system" else ""
        self.turns = [turn for turn in turns if turn[0] != "system"]
