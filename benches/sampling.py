"""What one sampled token costs: numpy against llama.cpp's own chain, and greedy for a tick.

    python -m benches.sampling              about 10 seconds

Both get the same logits, 152k of them. The chain is measured as `llama_sampler_sample` works:
the row is first copied into an array of (id, logit, p).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import llama_cpp.llama_cpp as llama
import numpy as np

from benches import report
from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import Sampler, greedy

N_VOCAB = 151_936
SETTINGS = {
    "top_k 40, top_p 0.95, min_p 0.05, temp 0.8": SamplingParams(0.8, 0.95, 40, 0.05),
    "temp 0.8 only": SamplingParams(0.8),
    "top_p 0.95, temp 0.8": SamplingParams(0.8, 0.95),
    "min_p 0.05, temp 0.8": SamplingParams(0.8, min_p=0.05),
}


def median_us(run: Callable[[], object], times: int = 101) -> float:
    """Return the median of `times` runs, in microseconds."""
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1e3


def rows() -> dict[str, FloatArray]:
    """Return logits as a trained model gives them, and as spread as they get."""
    rng = np.random.default_rng(1)
    peaked = rng.standard_normal(N_VOCAB).astype(np.float32)
    peaked[:60] += np.linspace(16, 6, 60, dtype=np.float32)
    flat = (rng.standard_normal(N_VOCAB) * 2).astype(np.float32)
    return {"peaked": peaked, "flat": flat}


def chain_of(params: SamplingParams) -> Callable[[FloatArray], object]:
    """Return a function that draws one token from a row as llama.cpp does."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if params.top_k > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(params.top_k))
    if params.top_p < 1:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_min_p(params.min_p, 1))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(params.temperature))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(1))
    data = (llama.llama_token_data * N_VOCAB)()
    table = np.frombuffer(data, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
    ids = np.arange(N_VOCAB)

    def draw(row: FloatArray) -> object:
        table["id"], table["logit"] = ids, row
        array = llama.llama_token_data_array(data, N_VOCAB, -1, False)
        llama.llama_sampler_apply(chain, ctypes.byref(array))
        return array.selected

    return draw


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; there is nothing to choose but ``--help``."""
    report.parser("sampling", __doc__).parse_args(argv)
    print(f"one token of {N_VOCAB:,}, median us       logits    numpy  llama.cpp's chain")
    for name, params in SETTINGS.items():
        for kind, row in rows().items():
            sampler, chain = Sampler(params, ()), chain_of(params)
            ours = median_us(lambda row=row, sampler=sampler: sampler(row))
            theirs = median_us(lambda row=row, chain=chain: chain(row))
            print(f"{name:45}  {kind:6} {ours:8.0f} {theirs:10.0f}")
    print("\ngreedy for all rows of a tick, median us")
    for n in (1, 8, 16):
        logits = np.random.default_rng(n).standard_normal((n, N_VOCAB)).astype(np.float32)
        each = median_us(lambda logits=logits: [row.argmax() for row in logits])
        whole = median_us(lambda logits=logits: greedy(logits))
        print(f"{n:3} rows: axis=1 with check {whole:6.0f}, row by row without {each:6.0f}")


if __name__ == "__main__":
    main()
