"""Who and what a story is about, and how its sentences speak of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.storyteller.words import Noun, article, capital

if TYPE_CHECKING:
    from random import Random

_PRONOUNS = {
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
}


class Spoken:
    """Something a template can name; a capital in an attribute's name opens a sentence."""

    def __getattr__(self, name: str) -> str:
        """Resolve `He` to the capitalised `he`, and so on."""
        lower = name.removesuffix("_cap").lower()
        if lower == name or name.startswith("_"):
            raise AttributeError(name)
        return capital(str(getattr(self, lower)))


class Known(Spoken):
    """What is named by a noun."""

    what: Noun

    @property
    def noun(self) -> str:
        """The bare noun."""
        return self.what.word

    def __format__(self, spec: str) -> str:
        """It, once it is known."""
        return f"the {self.what.word}"

    @property
    def a(self) -> str:
        """The noun with its article."""
        return article(self.what.word)


@dataclass
class Character(Known):
    """The hero or the friend."""

    rng: Random
    what: Noun
    name: str
    gender: str
    trait: str

    def __format__(self, spec: str) -> str:
        """Name or noun, as a teller alternates between them."""
        return self.name if self.rng.random() < 0.55 else f"the {self.what.word}"

    @property
    def a_trait(self) -> str:
        """The noun with its trait: "a shy fox"."""
        return article(f"{self.trait} {self.what.word}")

    @property
    def new(self) -> str:
        """The first mention."""
        noun = self.a_trait if self.rng.random() < 0.7 else self.a
        return f"{noun} {'named' if self.rng.random() < 0.6 else 'called'} {self.name}"

    @property
    def new_short(self) -> str:
        """The first mention in a summary."""
        return f"{capital(self.a)} named {self.name}"

    @property
    def new_mid(self) -> str:
        """The same inside a sentence."""
        return f"{self.a} named {self.name}"

    @property
    def poss(self) -> str:
        """The possessive."""
        return f"{self}'s"

    possessive = poss

    @property
    def possname(self) -> str:
        """The possessive of the name."""
        return f"{self.name}'s"

    @property
    def he(self) -> str:
        """The pronoun as a subject."""
        return _PRONOUNS[self.gender]["he"]

    @property
    def him(self) -> str:
        """The pronoun as an object."""
        return _PRONOUNS[self.gender]["him"]

    @property
    def his(self) -> str:
        """The possessive pronoun."""
        return _PRONOUNS[self.gender]["his"]

    @property
    def himself(self) -> str:
        """The reflexive pronoun."""
        return _PRONOUNS[self.gender]["himself"]


@dataclass
class Thing(Known):
    """An object of the story."""

    what: Noun
    look: str

    @property
    def fancy(self) -> str:
        """The first mention, with what it looks like."""
        return article(f"{self.look} {self.what.word}")

    @property
    def plain(self) -> str:
        """The thing without any magic."""
        return f"an ordinary {self.what.word}"


@dataclass
class Spot(Known):
    """A place of the story."""

    rng: Random
    what: Noun

    @property
    def at(self) -> str:
        """Where."""
        return f"{self.what.where} the {self.what.word}"

    @property
    def to(self) -> str:
        """Where to."""
        return f"to the {self.what.word}"

    @property
    def near(self) -> str:
        """Close by."""
        word = self.rng.choice(("near", "by", "not far from", "close to"))
        return f"{word} the {self.what.word}"


class Opening:
    """The same thing where it opens a sentence: every form of it is capitalised."""

    def __init__(self, inner: Spoken) -> None:
        self._inner = inner

    def __format__(self, spec: str) -> str:
        return capital(format(self._inner, spec))

    def __getattr__(self, name: str) -> str:
        lower = name.removesuffix("_cap").lower()
        return capital(str(getattr(self._inner, lower)))
