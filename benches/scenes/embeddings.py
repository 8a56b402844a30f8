"""Vectors a second of a small encoder, against llama-server; beside a reader; and whether they are the same.

    python -m benches embeddings              about five minutes
    python -m benches embeddings --texts 64   shorter

The encoder has the shape of bge-small (12 layers of 384, F32, random weights), texts have 4 to 60 words. *Alone*:
all texts in one request, to the daemon and to llama-server with each of some settings; its best one counts. *CPU ms* is the
processor time of the server for a vector: with --threads 1 it tells more than the rate where other programs run. *Beside a
reader*: the same, while somebody reads a stream of the 0.5B model; the gaps of that stream are those that he saw. *Cosine*: the
vector of each text alone against that from the crowd. *Rerank*: the order of 24 documents by a reranker of the same
shape, here and at llama-server, and the largest difference of a score.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches import beside, servers
from benches.clients import WORDS
from benches.driver import tool
from benches.model import bench_model
from benches.peers import programs
from benches.report import note, table
from uma_trio_sim.latency import percentile

SHAPE = {"layers": 12, "width": 384, "heads": 12, "ffn": 1536, "context": 512}
#: llama-server's settings; a slot for each input of a batch, and its largest batch.
PEERS = ("-np 1", "-np 4 -kvu", "-np 16 -kvu", "-np 4 -kvu -fa off")
_OUT = Path(__file__).resolve().parents[2] / "models" / "out"
_READ_S = 6.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--texts", type=int, default=256, metavar="N", help="how many (256)")
    add("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    add("--model", type=Path, help="the model that the reader reads")
    add(
        "--programs",
        type=Path,
        help="the folder of llama-server; default: what benches.peers built",
    )
    add("--seed", default="1")


@dataclass(frozen=True)
class Rate:
    """How fast vectors were made, and the processor time of each."""

    a_second: float
    cpu_ms: float


@tool(arguments)
def embeddings(given: argparse.Namespace) -> int:
    """Measure, and print a table and what was compared."""
    embedder, ranker = _encoder("mean"), _encoder("rank")
    draw = random.Random(given.seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 60))) for _ in range(given.texts)]
    peers = programs(given.programs)
    rows = [
        (f"llama-server {flags}", _peer_rate(peers, embedder, given.threads, flags, texts))
        for flags in PEERS
    ]
    best, least = max(r.a_second for _, r in rows), min(r.cpu_ms for _, r in rows)
    port = servers.free_port()
    setup = servers.Setup(bench_model(given.model), given.threads, n_ctx=4096, slots=4)
    extra = ("--http", str(port), "--embedding-model", str(embedder), "--rerank-model", str(ranker))
    with servers.daemon(setup, extra=extra) as running:
        alone, crowd = _rate(port, running.pid, texts)
        reading = _beside(port, running.pid, texts)
        rows.append(("uma-trio, alone", alone))
        cosines = [
            _cosine(_vectors(port, [text])[0], vector)
            for text, vector in zip(texts, crowd, strict=True)
        ]
        ours = _scores(port, texts[0], texts[1:25])
    with servers.llama_server(
        peers, servers.Setup(ranker, given.threads, 512), ("--reranking",)
    ) as there:
        theirs = _scores(there.wire.port, texts[0], texts[1:25])  # type: ignore[attr-defined]
    print(
        table(
            ["system", "vectors/s", "of the best", "CPU ms a vector", "least by it"],
            [(name, r.a_second, r.a_second / best, r.cpu_ms, least / r.cpu_ms) for name, r in rows],
        )
    )
    print(
        f"\nReader: gap p50 {reading['p50']:.1f}, p95 {reading['p95']:.1f}, worst {reading['worst']:.1f} ms, step "
        f"{reading['step']:.1f} ms; alone p95 {reading['alone']:.1f} ms. Rate beside the reader by the rate alone: "
        f"{reading['rate'] / alone.a_second:.2f}.\nCosine alone and in the crowd: at least {min(cosines):.7f} of "
        f"{len(cosines)}.\nRerank: order {'equal' if _order(ours) == _order(theirs) else 'DIFFERENT'}, largest difference of a score "
        f"{max(abs(ours[k] - theirs[k]) for k in ours):.2g} of {max(map(abs, theirs.values())):.2g}."
    )
    return 0


def _encoder(pooling: str) -> Path:
    from models.encoders import EncoderShape, write_encoder  # gguf takes long to import

    out = _OUT / f"bench-small-{pooling}.gguf"
    if not out.exists():
        note(f"making {out.name}, once")
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_suffix(".part")
        write_encoder(unfinished, EncoderShape(**SHAPE, pooling=pooling), name="bench-small")  # type: ignore[arg-type]
        unfinished.rename(out)
    return out


def _peer_rate(peers: Path, model: Path, threads: int, flags: str, texts: Sequence[str]) -> Rate:
    slots = int(flags.split()[1])
    setup = servers.Setup(model, threads, 512 * slots)
    extra = ("--embeddings", "-b", "2048", "-ub", "2048", *flags.split())
    with servers.llama_server(peers, setup, extra) as running:
        rate, _ = _rate(running.wire.port, running.pid, texts)  # type: ignore[attr-defined]
    note(f"llama-server {flags}: {rate.a_second:.1f} a second, {rate.cpu_ms:.1f} CPU ms each")
    return rate


def _rate(port: int, pid: int, texts: Sequence[str]) -> tuple[Rate, list[list[float]]]:
    """Return how fast a server makes vectors, and these, behind a few that warm it."""
    _vectors(port, texts[:8])
    began, cpu_s = time.monotonic(), _cpu_s(pid)
    found = _vectors(port, texts)
    took_s, cpu_s = time.monotonic() - began, _cpu_s(pid) - cpu_s
    return Rate(len(texts) / took_s, 1e3 * cpu_s / len(texts)), found


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process, in seconds (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _beside(port: int, pid: int, texts: Sequence[str]) -> dict[str, float]:
    with _reader(port) as times:
        time.sleep(_READ_S)
        alone, began = _gaps(times, 0.0), time.monotonic()
        rate, _ = _rate(port, pid, texts)
        gaps = _gaps(times, began)
        step = float(beside.metrics(port)["step_ms"])
    return {
        "rate": rate.a_second,
        "step": step,
        "alone": percentile(alone, 95),
        "p50": percentile(gaps, 50),
        "p95": percentile(gaps, 95),
        "worst": max(gaps),
    }


@contextlib.contextmanager
def _reader(port: int) -> Iterator[list[float]]:
    """Read a stream as a person does; yield the times of its parts."""
    times: list[float] = []
    ended = threading.Event()

    def run() -> None:
        asked = {
            "prompt": "Once upon a time",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        with contextlib.suppress(OSError, http.client.HTTPException):
            for now, _ in beside.parts(port, asked):
                times.append(now)
                if ended.is_set():
                    return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join(10)


def _gaps(times: Sequence[float], since: float) -> list[float]:
    found = [at for at in list(times) if at >= since]
    return [1e3 * (b - a) for a, b in itertools.pairwise(found)]


def _vectors(port: int, texts: Sequence[str]) -> list[list[float]]:
    found = _post(port, "/v1/embeddings", {"input": list(texts), "model": "bench-small"})
    return [each["embedding"] for each in found["data"]]


def _scores(port: int, query: str, documents: Sequence[str]) -> dict[int, float]:
    asked = {"query": query, "documents": list(documents), "model": "bench-small"}
    found = _post(port, "/v1/rerank", asked)
    return {each["index"]: each["relevance_score"] for each in found["results"]}


def _order(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda index: -scores[index])


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / math.hypot(*one) / math.hypot(*other)


def _post(port: int, path: str, body: dict[str, Any]) -> Any:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as link:
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:300]!r}")
        return json.loads(text)
