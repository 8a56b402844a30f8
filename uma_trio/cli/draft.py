"""`uma-trio doctor --draft-model`: whether a small model that guesses would pay on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from uma_trio.cli.output import OK, USAGE, complain, console, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from uma_trio.backend.base import Backend
    from uma_trio.config.options import Config
    from uma_trio.policy.cost import CostModel, Staircase
    from uma_trio.wiring import Progress

    Load = Callable[[Config, Progress | None], Backend]
    LoadDraft = Callable[[Config, Path, Backend], Backend]

STREAMS = (1, 2, 4)
CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# What a general model, a coder and the bundled storyteller can each go on with.
TEXTS = (
    "Once upon a time there was a small brown bear who lived in a",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "The capital of France is Paris. The capital of Italy is",
)
ANSWER = 32  # tokens of each that are compared


@frozen
class Verdict:
    """What a draft model gives with so many streams: how many times the tokens a second, by the chance.

    It pays from the chance `pays_from` on, None: never. `guesses` is how many the best draft has then.
    """

    streams: int
    times: dict[str, float]
    pays_from: float | None
    guesses: int


def show_draft(
    config: Config,
    path: Path,
    *,
    as_json: bool,
    load: Load | None = None,
    load_small: LoadDraft | None = None,
) -> int:
    """Measure both models and say what guesses would give: 0, or 1 if one cannot be loaded."""
    from uma_trio.backend.base import ModelError
    from uma_trio.costing.measured import measured_cost
    from uma_trio.wiring import load_backend
    from uma_trio.wiring_drafts import load_draft, steps_of

    try:
        served = (load or load_backend)(config, None)
        try:
            draft = (load_small or load_draft)(config, path, served)
            try:
                cost, took = measured_cost(served).cost, steps_of(measured_cost(draft).cost)
                right, tried = agreement(served, draft)
            finally:
                draft.close()
        finally:
            served.close()
    except ModelError as error:
        complain(str(error))
        return USAGE
    verdicts = [verdict(cost, took, n) for n in STREAMS]
    share = right / max(1, tried)
    if as_json:
        print_json({"draft_ms": 1e3 * took(1), "ms": 1e3 * one_s(cost), "right": share,
                    "streams": [asdict(one) for one in verdicts]})  # fmt: skip
    else:
        _show(path, cost, took, verdicts, share)
    return OK


def one_s(cost: CostModel) -> float:
    """Return the seconds of a decode of one token."""
    from uma_trio.policy.cost import Work

    return cost.seconds(Work(1, 1))


def verdict(cost: CostModel, took: Staircase, streams: int) -> Verdict:
    """Return what guesses of a model that `took` so long would give."""
    from uma_trio.policy.deadline.draft_cost import best_of_model
    from uma_trio.policy.deadline.drafts import WORTH

    def times(chance: float) -> float:
        return best_of_model(cost, took, streams, chance)[1]

    hundredths = [n / 100 for n in range(101)]
    pays = next((chance for chance in hundredths if times(chance) >= WORTH), None)
    guesses = 0 if pays is None else best_of_model(cost, took, streams, pays)[0]
    return Verdict(streams, {f"{chance:g}": times(chance) for chance in CHANCES}, pays, guesses)


def agreement(served: Backend, draft: Backend) -> tuple[int, int]:
    """Return how many of the served model's likeliest tokens the other would have guessed, of how many.

    Both go on with a few short texts. Their caches must be empty, and are left so.
    """
    right = tried = 0
    for text in TEXTS:
        prompt = served.vocabulary.tokenize(text, add_special=True, parse_special=False).tolist()
        known, following = list(prompt), list(prompt)
        for _ in range(ANSWER):
            said = _likeliest(served, known, len(known) - len(following))
            guess = _likeliest(draft, known, len(known) - len(following))
            if said in served.vocabulary.end_tokens:
                break
            right, tried = right + (said == guess), tried + 1
            known.append(said)
            following = [said]
        for backend in (served, draft):
            backend.kv_remove(0)
    return right, tried


def _likeliest(backend: Backend, tokens: Sequence[int], computed: int) -> int:
    """Return the likeliest token behind `tokens`, the first of which are `computed`."""
    from uma_trio.backend.base import ModelError

    n, batch = len(tokens) - computed, backend.batch
    batch.token[:n] = tokens[computed:]
    batch.pos[:n] = range(computed, len(tokens))
    batch.slot[:n] = 0
    batch.want[:n] = 0
    batch.want[n - 1] = 1
    if backend.decode(n):
        raise ModelError(f"{backend.model.name} cannot compute a text of {len(tokens)} tokens.")
    return int(backend.logits(1)[0].argmax())


def _show(
    path: Path, cost: CostModel, took: Staircase, verdicts: Sequence[Verdict], share: float
) -> None:
    from rich.table import Table

    out = console()
    out.print(
        f"A token takes {1e3 * one_s(cost):.2f} ms, and one of {path.name} {1e3 * took(1):.2f} ms. "
        f"It guesses {100 * share:.0f} % of the tokens of a few short texts."
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("STREAMS", *(f"{100 * chance:.0f} % RIGHT" for chance in CHANCES), "PAYS FROM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in verdicts:
        pays = "never" if one.pays_from is None else f"{100 * one.pays_from:.0f} %"
        table.add_row(str(one.streams), *(f"{times:.2f}" for times in one.times.values()), pays)
    out.print(table)
    out.print(
        "Times the tokens a second; 1.00 where it is better not to ask it, and it is not asked."
    )
    alone = verdicts[0].pays_from
    if alone is not None and share >= alone:
        out.print("It would pay for one stream.")
    elif any(one.pays_from is not None and share >= one.pays_from for one in verdicts):
        out.print("It would pay only where several streams decode together.")
    else:
        out.print("It would not pay here: its guesses cost more than they give.")
