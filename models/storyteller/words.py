"""The words of the storyteller's world, and the small grammar they need."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

HERE = Path(__file__).parent
STYLES = 6

T = TypeVar("T")


@cache
def load(name: str) -> dict[str, Any]:
    """One of the TOML files beside this module."""
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def split(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def article(phrase: str) -> str:
    """The phrase with "a" or "an" before it."""
    first = phrase.split()[0].lower()
    vowel = first[0] in "aeiou" and not first.startswith(("uni", "use", "ukulele", "one", "eu"))
    return f"{'an' if vowel or first in ('honest', 'hour') else 'a'} {phrase}"


def capital(phrase: str) -> str:
    """The phrase with its first letter large."""
    return phrase[:1].upper() + phrase[1:]


def joined(parts: Sequence[str]) -> str:
    """The parts as English lists them: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def digest(*parts: object) -> int:
    """A number that depends on nothing but the parts, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


def held_out(one: str, other: str) -> bool:
    """Whether this pair of nouns is kept for the evaluation: about one pair in forty."""
    return digest("pair", *sorted((one, other))) % 40 == 0


def style_of(noun: str) -> int:
    """The manner in which stories about this noun like to be told."""
    return digest("style", noun) % STYLES


@dataclass(frozen=True)
class Noun:
    """A word for somebody, something or somewhere."""

    word: str
    plural: str
    kind: str  # "person", "animal", "place", or the sort of an object
    gender: str = ""  # of a person the word itself says it of
    where: str = ""  # the preposition of a place


def _plural(word: str) -> str:
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def _noun(item: str, kind: str, gender: str = "") -> Noun:
    word, _, plural = item.partition("/")
    return Noun(word, plural or _plural(word), kind, gender)


@dataclass(frozen=True)
class World:
    """Every list of the world, read once."""

    people: tuple[Noun, ...]
    animals: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    places: tuple[Noun, ...]
    names: dict[str, tuple[str, ...]]
    details: dict[str, tuple[str, ...]]
    traits: dict[str, str]
    sorts: dict[str, tuple[str, ...]]
    common: tuple[str, ...]
    abstract: tuple[str, ...]

    @property
    def characters(self) -> tuple[Noun, ...]:
        """People and animals."""
        return self.people + self.animals


def _place(item: str) -> Noun:
    where, _, rest = item.partition(" ")
    noun = _noun(rest, "place")
    return Noun(noun.word, noun.plural, "place", where=where)


@cache
def world() -> World:
    """The world of the stories."""
    raw = load("words")
    people = [
        _noun(item, "person", "" if gender == "any" else gender)
        for gender, items in raw["people"].items()
        for item in split(items)
    ]
    objects = [_noun(item, kind) for kind, items in raw["objects"].items() for item in split(items)]
    return World(
        people=tuple(people),
        animals=tuple(_noun(item, "animal") for item in split(raw["animals"]["any"])),
        objects=tuple(objects),
        places=tuple(_place(item) for item in split(raw["places"]["all"])),
        names={gender: split(items) for gender, items in raw["names"].items()},
        details={name: split(items) for name, items in raw["details"].items()},
        traits=dict(raw["traits"]),
        sorts={name: split(items) for name, items in raw["sorts"].items()},
        common=split(raw["common"]["words"]),
        abstract=split(raw["common"]["abstract"]),
    )


_ONSETS = split(
    "b, bl, br, c, ch, cl, d, dr, f, fl, fr, g, gl, gr, h, j, k, kl, l, m, n, p, pl, pr, qu, r, s, "
    "sh, sk, sl, sm, sn, sp, st, str, sw, t, th, tr, tw, v, w, wh, y, z"
)
_VOWELS = split("a, e, i, o, u, a, e, i, o, u, ai, ee, oa, oo, ou, ea, y, au")
_CODAS = split(
    "b, ck, d, ff, g, l, ll, m, mp, n, nd, ng, nk, nt, p, r, rd, rk, rm, rn, rt, s, sh, sk, ss, "
    "st, t, th, x, zz, le, er, el, in, o, a"
)


def invented(rng: Random) -> str:
    """A pronounceable word that need not exist: what a newcomer may well ask for."""
    word = ""
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        word += rng.choice(_ONSETS) + rng.choice(_VOWELS)
        if rng.random() < 0.4:
            word += rng.choice(_CODAS)
    return word if len(word) > 2 else word + rng.choice(_CODAS)


def leaning(rng: Random, options: Sequence[T], lean: int, weight: float = 0.55) -> T:
    """One of the options; more often than not the one that `lean` points at.

    Even choices would leave a greedy reader of the distribution with ties, and every
    story would sound the same; a lean that follows from what was asked gives each
    request a way of its own.
    """
    if rng.random() < weight:
        return options[lean % len(options)]
    return options[int(rng.random() * len(options))]
