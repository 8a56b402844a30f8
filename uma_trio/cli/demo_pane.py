"""What one client of the demonstration has seen so far."""

from __future__ import annotations

from attrs import define, field


@define
class Pane:
    """What one client has seen so far; times in seconds."""

    name: str
    prompt: str
    chat: bool = True
    text: str = ""
    tokens: int = 0
    asked: float = 0.0
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(factory=list)
    state: str = "waiting"

    def saw(self, text: str, now: float) -> None:
        """Note a token that came `now`."""
        if self.first is None:
            self.first = now - self.asked
            self.state = "streaming"
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.tokens += 1
        self.text += text

    def held_back(self, text: str) -> None:
        """Note the last piece of text, which belongs to no single token."""
        self.text += text

    @property
    def rate(self) -> float:
        """Tokens a second, from the first one on."""
        took = sum(self.gaps)
        return len(self.gaps) / took if took else 0.0
