"""One word has one meaning: what docs/GLOSSARY.md says of the names in the code and of what users read is so."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from test_architecture import SHIPPED, modules, name_of, tree

from uma_trio.config.options import OPTIONS
from uma_trio.telemetry.catalogue import METRICS, SCORECARD

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8")
WORDS, _, REST = GLOSSARY.partition("## Words that users need")
USERS, _, REST = REST.partition("## Words with one place")
PLACES, _, TWICE = REST.partition("## Names that are used twice")
MOST_OF_OUR_OWN = 10

# What `explain`, `ps` and `top` say beside what clients sent.
SAYING = (
    *("stories/sentences.py", "engine/waits.py", "cli/ps.py", "cli/top_view.py"),
    *("cli/overview.py", "policy/baseline.py", "policy/decode.py", "policy/line.py"),
    *("policy/deadline/fill.py", "policy/deadline/slack.py"),
)


def public_classes() -> Iterator[str]:
    """Yield the name of each public class of the shipped code, as often as there is one."""
    for path in modules(*SHIPPED):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def rows() -> list[tuple[str, str]]:
    """Return the terms of the glossary's tables, and what else they are called ("" in the field's)."""
    found = re.findall(r"^\| ([^|]+) \|[^|\n]+\|(?: ([^|\n]+) \|)?$", WORDS, re.MULTILINE)
    return [(term, also) for terms, also in found if terms != "term" for term in terms.split(", ")]


def terms() -> list[str]:
    """Return the terms of the glossary's tables."""
    return [term for term, _ in rows()]


def our_own() -> list[str]:
    """Return the terms that somebody who knows the field does not know."""
    return [term for term, also in rows() if also and term not in also.split(", ")]


def declared(module: ast.Module) -> Iterator[str]:
    """Yield the names that outlive a function: of classes, functions, parameters, attributes, constants."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for inner in node.body:
                targets = inner.targets if isinstance(inner, ast.Assign) else []
                targets = [inner.target] if isinstance(inner, ast.AnnAssign) else targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def has(name: str, word: str) -> bool:
    """Whether a name contains a word of snake case or camel case, or its plural."""
    spelt = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if word == "held":
        spelt = spelt.replace("held_back", "")  # a word of its own
    return re.search(rf"(^|_){word}s?(_|$)", spelt) is not None


def within(module: str, places: set[str]) -> bool:
    """Whether a module is one of those places, which are said without ``uma_trio.``, or below one."""
    name = module.removeprefix("uma_trio.")
    return any(name == place or name.startswith(f"{place}.") for place in places)


def said() -> Iterator[str]:
    """Yield what users read of our own words: texts of options and metrics, and sentences."""
    yield from (item.help for item in OPTIONS)
    yield from (metric.help for metric in (*METRICS, *SCORECARD))
    for path in (ROOT / "uma_trio" / name for name in SAYING):
        nodes = list(ast.walk(tree(path)))
        documents = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and isinstance(node.body[0], ast.Expr)
        }
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text and id(node) not in documents:
                yield text


def test_a_name_that_two_classes_have_is_in_the_list_of_those() -> None:
    """Nobody takes a name again without saying why, and the list keeps no name that is unique."""
    twice = {name for name, times in Counter(public_classes()).items() if times > 1}
    listed = set(re.findall(r"`([A-Z]\w+)`", TWICE))
    assert twice - listed == set(), "choose another name, or add it to docs/GLOSSARY.md"
    assert listed - twice == set(), "these are unique now: remove them from docs/GLOSSARY.md"


def test_a_word_with_several_meanings_has_one_in_each_place() -> None:
    """A name with such a word is in a module that the glossary names, and no row there is stale."""
    listed = [
        (word, set(re.findall(r"`([\w.]+)`", places)))
        for word, places in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PLACES, re.MULTILINE)
    ]
    names_in = {name_of(path): set(declared(tree(path))) for path in modules(*SHIPPED)}
    for word in {word for word, _ in listed}:
        rows_of = [places for listed_word, places in listed if listed_word == word]
        places = set().union(*rows_of)
        found = {
            module: sorted(found)
            for module, names in names_in.items()
            if (found := {name for name in names if has(name, word)})
        }
        elsewhere = {name: names for name, names in found.items() if not within(name, places)}
        assert elsewhere == {}, f"choose another word than {word}, or say it in docs/GLOSSARY.md"
        stale = [row for row in rows_of if not any(within(name, row) for name in found)]
        assert stale == [], f"no name there contains {word} any more"


def test_users_need_ten_words_of_our_own() -> None:
    """Whatever else of our terms options, metrics, `explain`, `ps` or `top` use is the field's."""
    needed = re.findall(r"`(\w+)`", USERS.partition(":")[2])
    assert len(needed) == len(set(needed)) <= MOST_OF_OUR_OWN
    texts = [re.sub(r"`[^`]*`|--[\w-]+", "", text) for text in said()]  # but for names
    used = {
        term
        for term in our_own()
        if any(re.search(rf"(?<![\w-]){term}s?(?![\w-])", text, re.IGNORECASE) for text in texts)
    }
    assert used <= set(needed), "say it in plain words"
    assert set(needed) - used <= {"step"}, "`step_ms` has it"


def test_a_term_is_explained_once() -> None:
    """Two rows for one word would be two meanings."""
    assert len(terms()) > 40
    assert [term for term, times in Counter(terms()).items() if times > 1] == []


def test_a_term_is_used() -> None:
    """A word that neither code nor documents use needs no row."""
    texts = [path.read_text(encoding="utf-8") for path in modules(*SHIPPED)]
    texts += [
        path.read_text(encoding="utf-8")
        for path in ROOT.glob("docs/*.md")
        if path.name != "GLOSSARY.md"
    ]
    used = re.sub(r"[\s_-]+", " ", " ".join(texts)).lower()
    assert [term for term in terms() if re.sub(r"[\s-]", " ", term).lower() not in used] == []
