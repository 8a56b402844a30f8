"""The draft model beside the one that is served (`--draft-model`): loaded, checked, measured.

It has a context of its own, which takes as much room as one of the served model would for its shape.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attrs import frozen

from uma_trio.backend.base import Backend, ModelError, Vocabulary
from uma_trio.config.options import Config
from uma_trio.costing.attention import flash_is_faster
from uma_trio.costing.measured import measured_cost
from uma_trio.engine.drafts import Drafter, Drafting
from uma_trio.engine.drafts.model import DraftModel
from uma_trio.engine.planner import EngineSettings
from uma_trio.machine import physical_cores
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.telemetry import log

# Models of one family fill their tables up to different lengths; llama.cpp's own speculation allows as
# much (common/speculative.cpp, SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
MOST_MORE_TOKENS = 128


@frozen(eq=False)
class Drafts:
    """What an engine is told of the draft model; `backend` is the model, None if there is none."""

    settings: EngineSettings
    drafter: Drafting | None = None
    backend: Backend | None = None

    def close(self) -> None:
        """Free the model. The engine must have ended."""
        if self.backend is not None:
            self.backend.close()


def drafts_by(config: Config, served: Backend, settings: EngineSettings) -> Drafts:
    """Load and measure the draft model that is named, if one is.

    Takes as long as the disk does, and two seconds the first time. Raises :class:`ModelError`.
    """
    if config.draft_model is None:
        return Drafts(settings)
    if not settings.drafts or settings.cost is None or not settings.contract.paid_drafts:
        log.get("drafts").warning(
            "--draft-model is not loaded: its guesses need --speculation auto and a policy that has a "
            "cost model"
        )
        return Drafts(settings)
    draft = load_draft(config, config.draft_model, served)
    return _drafts(settings, settings.cost, served, draft)


def load_draft(config: Config, path: Path, served: Backend) -> Backend:
    """Load the model at `path` as a draft of the one that is `served`. Raises :class:`ModelError`."""
    from uma_trio.backend.llama import LlamaBackend  # takes a while, and tests do without

    report = log.get("llama.cpp")
    load = partial(
        LlamaBackend.load,
        path,
        n_ctx=config.n_ctx,
        n_slots=config.parallel,
        threads=config.threads or physical_cores(),
        flash_attention=config.flash_attention,
        flash_is_faster=flash_is_faster,
        mlock=config.mlock,
        mmap=config.mmap,
        gpu_layers=config.gpu_layers,
        log=lambda level, text: getattr(report, level)(text),
    )
    try:
        draft = load()
    except ModelError as error:
        raise ModelError(str(error).replace("--model", "--draft-model")) from error
    try:
        refuse_another_vocabulary(served.vocabulary, draft.vocabulary, path)
        if not draft.limits.can_go_back:
            raise ModelError(
                f"--draft-model {path}: its memory cannot drop wrong guesses (a recurrent model);"
                " name one with attention."
            )
    except ModelError:
        draft.close()
        raise
    return draft


def refuse_another_vocabulary(served: Vocabulary, draft: Vocabulary, path: Path) -> None:
    """Raise :class:`ModelError` unless the tokens of both models mean the same."""
    differ = _difference(served, draft)
    if differ:
        raise ModelError(
            f"--draft-model {path} has another vocabulary than the served model: {differ};"
            " name a smaller model of the same family."
        )


def steps_of(draft: CostModel) -> Staircase:
    """Return what a decode of so many tokens takes, each with a row of logits."""
    sizes = tuple(draft.steps)
    return Staircase(sizes, tuple(draft.seconds(Work(n, min(n, 8))) for n in sizes))


def _drafts(settings: EngineSettings, cost: CostModel, served: Backend, draft: Backend) -> Drafts:
    try:
        took = steps_of(measured_cost(draft).cost)
        model = DraftModel(draft, took, served.model.n_vocab)
    except BaseException:
        draft.close()
        raise
    return Drafts(settings, Drafter(model, cost), draft)


def _difference(served: Vocabulary, draft: Vocabulary) -> str:
    """Return where two vocabularies differ first, in words; "" if they are the same."""
    one, other = served.n_vocab, draft.n_vocab
    if abs(one - other) > MOST_MORE_TOKENS:
        return f"it has {other:,} tokens instead of {one:,}"
    pairs = zip(served.pieces(), draft.pieces(), strict=False)
    for token, (mine, its) in enumerate(pairs):
        if mine != its:
            return f"token {token} is {_shown(its)} instead of {_shown(mine)}"
    for what, mine_text, its_text in (
        ("beginning-of-text token", served.bos_text, draft.bos_text),
        ("end-of-text token", served.eos_text, draft.eos_text),
    ):
        if mine_text != its_text:
            return f"its {what} is {its_text!r} instead of {mine_text!r}"
    if served.adds_bos != draft.adds_bos:
        return "only one of them begins each text with a beginning-of-text token"
    return ""


def _shown(piece: bytes) -> str:
    return repr(piece.decode("utf-8", "replace"))
