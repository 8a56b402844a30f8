"""What sampling costs: one row beside llama.cpp's own chain, all rows of a tick, and extras.

Both samplers get the same logits. The chain is measured as `llama_sampler_sample` works: the row is
first copied into an array of (id, logit, p). The rows of a tick are chosen as the engine does, and
beside that each by itself; the bare argmax is what reading them once costs. Extras are what
penalties, logprobs and the like add to a tick of eight rows: to the choice, for which the next
decode waits, and to what is done while that decode runs, where logprobs are computed.
"""

from __future__ import annotations

import ctypes
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from benches.contest import Row
from uma_trio.backend._llama_binding import llama
from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import Sampler, TickSampler

Records = NDArray[np.void]  # id, logit, p
N_VOCAB = 151_936
SETTINGS = {
    "top_k 40, top_p 0.95, min_p 0.05, temp 0.8": SamplingParams(0.8, 0.95, 40, 0.05),
    "temp 0.8 only": SamplingParams(0.8),
    "top_p 0.95, temp 0.8": SamplingParams(0.8, 0.95),
    "min_p 0.05, temp 0.8": SamplingParams(0.8, min_p=0.05),
}
VOCABULARIES = (4_096, 128_256, 151_936)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)
TICKS = {
    "greedy": [SamplingParams()],
    "sampled": [SAMPLED],
    "half of each": [SAMPLED, SamplingParams()],
}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repeat_penalty": 1.1}
EXTRAS: dict[str, dict[str, Any]] = {
    "none": {},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "penalties": PENALTIES,
    "bias of 100 tokens": {"logit_bias": tuple((token, -1.0) for token in range(100))},
}
ANSWERED = 1000  # tokens behind each row, so many distinct


def least_us(run: Callable[[], object], times: int = 50) -> float:
    """Return the least of `times` runs, in microseconds: other work only ever adds to it."""
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - start)
    return min(taken) / 1e3


def rows(n: int = 1, n_vocab: int = N_VOCAB) -> dict[str, FloatArray]:
    """Return `n` rows of logits as a trained model gives them, and as spread as they get."""
    rng = np.random.default_rng(1)
    peaked = rng.standard_normal((n, n_vocab), np.float32)
    for row in peaked:
        row[rng.choice(n_vocab, 60, replace=False)] += np.linspace(16, 6, 60, dtype=np.float32)
    flat = rng.standard_normal((n, n_vocab), np.float32) * 2
    return {"peaked": peaked, "flat": flat}


def chain_of(params: SamplingParams, n_vocab: int = N_VOCAB) -> Callable[[FloatArray], Records]:
    """Return a function that draws from a row as llama.cpp does, and returns what it drew from."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if params.top_k > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(params.top_k))
    if params.top_p < 1:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_min_p(params.min_p, 1))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(params.temperature))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(1))
    data = (llama.llama_token_data * n_vocab)()
    table = np.frombuffer(data, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
    ids = np.arange(n_vocab)

    def draw(row: FloatArray) -> Records:
        table["id"], table["logit"] = ids, row
        array = llama.llama_token_data_array(data, n_vocab, -1, False)
        llama.llama_sampler_apply(chain, ctypes.byref(array))
        return table[: array.size]

    weakref.finalize(draw, llama.llama_sampler_free, chain)
    return draw


def one_token() -> Iterator[Row]:
    """Yield what choosing from one row costs: ours beside llama.cpp's."""
    for name, params in SETTINGS.items():
        for kind, (row,) in rows().items():
            sampler, chain = Sampler(params, ()), chain_of(params)
            ours = least_us(lambda row=row, sampler=sampler: sampler(row))
            theirs = least_us(lambda row=row, chain=chain: chain(row))
            yield {"what": f"{name}; {kind} logits", "us": ours, "llama.cpp's chain us": theirs}


def one_tick() -> Iterator[Row]:
    """Yield what choosing all rows of a tick costs: together, each by itself, and only reading."""
    for n_vocab in VOCABULARIES:
        for n in (1, 4, 8, 16):
            logits = rows(n, n_vocab)["peaked"]
            read = least_us(lambda logits=logits: logits.argmax(axis=1))
            for name, params in TICKS.items():
                samplers = [Sampler(params[i % len(params)], ()) for i in range(n)]
                choice = TickSampler(samplers, n_vocab)
                together = least_us(lambda x=logits, choice=choice: choice(x))
                alone = least_us(
                    lambda x=logits, samplers=samplers: [
                        sampler(row) for row, sampler in zip(x, samplers, strict=True)
                    ]
                )
                what = f"{n} rows of {n_vocab:,}, {name}"
                yield {"what": what, "us": together, "each alone us": alone, "argmax us": read}


def extras(n: int = 8, times: int = 40) -> Iterator[Row]:
    """Yield what it adds to a tick of `n` rows when all of them ask for one thing more; medians."""
    logits = rows(n)["peaked"]
    for name, params in {"greedy": SamplingParams(), "sampled": SAMPLED}.items():
        choices = {}
        for extra, asked in EXTRAS.items():
            samplers = [Sampler(evolve(params, **asked), ()) for _ in range(n)]
            for sampler in samplers:
                for token in range(ANSWERED):
                    sampler.accept(token)
            choices[extra] = TickSampler(samplers, N_VOCAB)
        choosing: dict[str, list[int]] = {extra: [] for extra in choices}
        describing: dict[str, list[int]] = {extra: [] for extra in choices}
        for _ in range(times):
            for extra, choice in choices.items():
                start = time.perf_counter_ns()
                chosen = choice(logits)
                between = time.perf_counter_ns()
                dict(chosen.logprobs)
                choosing[extra].append(between - start)
                describing[extra].append(time.perf_counter_ns() - between)
        plain = statistics.median(choosing["none"]) / 1e3
        for extra in choices:
            chosen_us = statistics.median(choosing[extra]) / 1e3
            yield {
                "what": f"{n} rows, {name}, {extra}",
                "us": chosen_us,
                "more us": chosen_us - plain,
                "overlapped us": statistics.median(describing[extra]) / 1e3,
            }
