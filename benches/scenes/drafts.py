"""What drafts give on texts of this repository, told again over a measured staircase.

    python -m benches drafts                        one stream, every workload (half a minute)
    python -m benches drafts --n 1 2 3 --machine q8_0

No model, no server: :mod:`benches.retelling` runs the shipped drafter and policy, and a model that says
what was recorded. The texts come from this repository's own history, the oldest commits first:

- *agent*: steps of an agent that edits a file: it reads, names what it replaces, and what by;
- *blocks*: a file is asked for as blocks of lines to find and lines to put in their place;
- *whole*: the changed file is asked for as a whole;
- *code*: a new file, from its name alone; *prose*: a page of docs/, the same way.

Tokens are cut by a rule that resembles a trained tokenizer's: words with their space, no longer than
six letters, digits one by one, runs of spaces, single other characters.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benches import host, report
from benches.contest import Row
from benches.driver import tool
from benches.retelling import retell
from uma_trio_sim.machine import TABLES, built_in
from uma_trio_sim.simulation import Told

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"agent": 1.45, "blocks": 2.0, "whole": 3.9, "code": 1.05, "prose": 1.0}
MOST_BYTES, LEAST_BYTES = 9_000, 1_500  # of a file
_TOKEN = re.compile(r" ?[A-Za-z]{1,6}|\d| +|\n+ *|.", re.DOTALL)


class Edit(NamedTuple):
    """A change of a file, and what was said of it."""

    subject: str
    path: str
    before: str
    after: str


class Text(NamedTuple):
    """What is asked, and what is answered."""

    prompt: str
    answer: str


def git(*words: str) -> str:
    """Return what git says about this repository."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def edits(n: int) -> Iterator[Edit]:
    """Yield up to `n` changes of Python files, the oldest first: at most one of a commit."""
    log = git("log", "--reverse", "--diff-filter=M", "--name-only", "--format=>%H %s", "--", "*.py")
    for entry in log.split(">")[1:]:
        head, *names = entry.strip().splitlines()
        commit, _, subject = head.partition(" ")
        for name in filter(None, names):
            before, after = git("show", f"{commit}~:{name}"), git("show", f"{commit}:{name}")
            if LEAST_BYTES <= len(before) <= MOST_BYTES and LEAST_BYTES <= len(after) <= MOST_BYTES:
                yield Edit(subject, name, before, after)
                n -= 1
                break
        if n <= 0:
            return


def hunks(edit: Edit) -> Iterator[tuple[str, str]]:
    """Yield each changed part, with two lines around it, before and after."""
    old, new = edit.before.splitlines(keepends=True), edit.after.splitlines(keepends=True)
    for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(2):
        yield (
            "".join(old[group[0][1] : group[-1][2]]),
            "".join(new[group[0][3] : group[-1][4]]),
        )


def blocks(edit: Edit) -> Iterator[Text]:
    """Yield the change as blocks to find and to replace."""
    answer = "".join(
        f"<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n" for old, new in hunks(edit)
    )
    yield Text(f"{edit.path}\n```\n{edit.before}```\n{edit.subject}\n", answer)


def whole(edit: Edit) -> Iterator[Text]:
    """Yield the change as the whole file."""
    yield Text(f"{edit.path}\n```\n{edit.before}```\n{edit.subject}\n```\n", edit.after)


def agent(edit: Edit) -> Iterator[Text]:
    """Yield each step of an agent that makes the change, with all steps before it."""
    said = f"{edit.path}\n```\n{edit.before}```\n{edit.subject}\n"
    for old, new in hunks(edit):
        step = (
            f"Next I change {edit.path} for: {edit.subject}.\n"
            f'{{"name": "edit_file", "arguments": {{"path": "{edit.path}", "old": """{old}""", '
            f'"new": """{new}"""}}}}\n'
        )
        yield Text(said, step)
        said += f"{step}The file {edit.path} has been edited.\n"


def changed(kind: Callable[[Edit], Iterator[Text]], n: int) -> list[Text]:
    """Return up to `n` texts about changes."""
    found = [text for edit in edits(n) for text in kind(edit)]
    return [text for text in found if text.answer][:n]


def fresh(paths: str, n: int) -> list[Text]:
    """Return up to `n` files, each asked for by its name."""
    names = git("ls-files", paths).split()
    contents = [(name, (ROOT / name).read_text("utf-8")[:MOST_BYTES]) for name in names]
    return [Text(f"Write {name}.\n", text) for name, text in contents if len(text) > LEAST_BYTES][
        :n
    ]


WORKLOADS: dict[str, Callable[[int], list[Text]]] = {
    "agent": lambda n: changed(agent, n),
    "blocks": lambda n: changed(blocks, n),
    "whole": lambda n: changed(whole, n),
    "code": lambda n: fresh("uma_trio/*.py", n),
    "prose": lambda n: fresh("docs/*.md", n),
}


def as_tokens(texts: list[Text]) -> list[Told]:
    """Cut texts into tokens, which are numbered as they come."""
    ids: dict[str, int] = {}

    def cut(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        # The fake model's own tokens come first.
        return np.array(
            [300 + ids.setdefault(word, len(ids)) for word in _TOKEN.findall(text)], np.int32
        )

    return [Told(cut(text.prompt), cut(text.answer)) for text in texts]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    add("--n", type=int, nargs="+", default=[1], metavar="N", help="streams at once")
    add("--texts", type=int, default=24, metavar="N", help="of each workload")
    add("--machine", choices=list(TABLES), default="q4_0", help="whose staircase")


@tool(arguments)
def drafts(given: argparse.Namespace) -> int:
    """Tell each workload with and without drafts; print a table, write one CSV."""
    facts = host.facts()
    rows: list[Row] = []
    for workload in given.workloads:
        texts = as_tokens(WORKLOADS[workload](given.texts))
        rows += [measured(workload, texts, given.machine, n) for n in given.n]
    columns = list(rows[0])
    print(report.table(columns, [[row[key] for key in columns] for row in rows]))
    print(f"\n{report.write_csv('drafts', rows, facts)}")
    return 0


def measured(workload: str, texts: list[Told], machine: str, n: int) -> Row:
    """Tell `texts` to `n` readers with and without drafts."""
    profile = built_in(machine)
    plain = retell(texts, profile, readers=n, drafts=False)
    with_drafts = retell(texts, profile, readers=n)
    tokens = sum(len(told.answer) for told in texts)
    return {
        "workload": workload,
        "streams": n,
        "texts": len(texts),
        "tokens": tokens,
        "tokens/s without": round(plain.tokens_s, 1),
        "with": round(with_drafts.tokens_s, 1),
        "times": round(with_drafts.tokens_s / plain.tokens_s, 2),
        "target": TARGETS[workload] if n == 1 else None,
        "accepted": round(with_drafts.accepted / max(1, with_drafts.drafted), 2),
        "tokens/delivery": round(tokens / max(1, with_drafts.deliveries), 2),
    }
