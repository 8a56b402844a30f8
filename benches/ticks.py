"""What a tick costs the engine itself: streams on a backend whose decode returns at once."""

from __future__ import annotations

import gc
import time

import numpy as np
from attrs import evolve

from uma_trio.backend.base import DecodeStatus, FloatArray, Overlap, Traits, nothing
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import SamplingParams, StreamItem, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.by_name import find_policy
from uma_trio_sim.fake import FakeBackend, FakeVocabulary
from uma_trio_sim.machine import built_in
from uma_trio_sim.simulation import settings_for

_VOCABULARY = 8192  # so few that reading the logits is a small part
_LOTS = 1 << 30


class _Words(FakeVocabulary):
    n_vocab = _VOCABULARY

    def pieces(self) -> list[bytes]:
        """Return a word for each token."""
        return [b"w%d " % token for token in range(_VOCABULARY)]


class NoBackend(FakeBackend):
    """Computes nothing: the rows of logits are a few that were drawn before."""

    def __init__(self, *, overlaps: bool) -> None:
        super().__init__(n_ctx=200_000, n_slots=17, n_batch=512)
        self.model = evolve(self.model, n_vocab=_VOCABULARY)
        self.vocabulary = _Words()
        drawn = np.random.default_rng(1).normal(size=(64, _VOCABULARY))
        self._drawn = drawn.astype(np.float32)
        self._traits = Traits(interruptible=not overlaps, overlaps=overlaps)

    @property
    def traits(self) -> Traits:
        """As a CPU or, where decodes overlap, a GPU."""
        return self._traits

    def decode(self, _n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Return at once."""
        while_computing()
        self.decodes += 1
        return DecodeStatus.OK

    def logits(self, n_rows: int) -> FloatArray:
        """Return other rows after each decode."""
        first = self.decodes % 32
        return self._drawn[first : first + n_rows]


class _Nowhere:
    def send_nowait(self, item: StreamItem) -> None:
        """Drop it."""

    def flush(self) -> None:
        """Nothing is here."""


def one_tick_us(policy: str, k: int, ticks: int, *, drawn: bool, overlaps: bool) -> float:
    """Return the microseconds of a tick of `k` interactive streams: the least of five rounds."""
    settings = evolve(settings_for(built_in("q4_0")), prefix_bytes=1 << 28, drafts=False)
    params = SamplingParams(ignore_eos=True)
    if drawn:
        params = evolve(params, temperature=0.8, top_k=40, top_p=0.95)
    inbox, outlet, clock = Inbox(k), Outlet(lambda deliver: deliver()), time.perf_counter
    backend = NoBackend(overlaps=overlaps)
    engine = Engine(
        backend, find_policy(policy), inbox, outlet, Metrics(), clock, settings=settings
    )
    for handle in range(1, k + 1):
        prompt = np.arange(handle, handle + 20, dtype=np.int32)
        most = 6 * ticks + 100
        submit = Submit(
            handle, prompt, most, params, (), "interactive", handle, _LOTS, _Nowhere(), clock()
        )
        inbox.submit(evolve(submit, namespace="bench"))
    for _ in range(ticks):
        engine.tick()
    gc.collect()
    rounds = []
    for _ in range(5):
        began = clock()
        for _ in range(ticks):
            engine.tick()
        rounds.append((clock() - began) / ticks)
    return min(rounds) * 1e6
