"""Coding agents beside a reader: how many a server holds at a pace, as aiperf measures it.

    python -m benches agentx                            1, 2, 4, 8 and 16 agents (40 minutes on a GPU)
    python -m benches agentx --agents 1 2 --context 4096 --peer-flags '-cram 0'       two cores
    python -m benches agentx --scenario                 AgentX's recorded traces; 15 minutes for each measurement

Each agent plays one session over ``/v1/chat/completions``: a long first prompt whose beginning others share, then
turns that add files and tool results to the conversation, a second or two after each answer. A reader asks questions of 64
tokens meanwhile, one after another, and reads answers of 100. A server *holds* so many agents if 95 % of the first
tokens of later turns come within `--ttft` seconds, and 95 % of the answers have `--pace` tokens/s; *within* counts the
agents all of whose turns do. The daemon and llama-server have a slot for each client; llama-server runs once with each set of
`--peer-flags`, and the best counts. Neither drafts.

The client is ``aiperf`` of NVIDIA, unmodified (``pip install aiperf``, or ``make clients``): on PATH, or named by
``--aiperf``. Sessions come from ``aiperf synthesize agentic-code``, with prompts that end at `--context` tokens; with `--scenario` they
are the traces of its AgentX scenario, which it downloads. Where aiperf cannot be installed, ``--replay`` plays the same sessions
with the client of these benchmarks; `--sessions FILE` names a file that was synthesized elsewhere (`--synthesize FILE` writes it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benches import clients, contest, servers
from benches.clients import Answer, Job, NotServed, SseWire
from benches.contest import OURS, PEER, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, Stream
from benches.report import cell
from benches.scenes.agents import heard, peer_arguments
from uma_trio_sim.latency import percentile

BLOCK = 512  # tokens of a block of text that a session names by a number
QUESTION, ANSWER = 64, 100
TEMPLATE = 48  # tokens at most that a chat template puts around a turn
PATIENCE_S = 900.0
TRACES = "semianalysis-cc-traces-weka-061526"
PEER_FLAGS = ("-np {slots} -cram 0 -fa on",)
_TABLE = Table("", (
    ("within", "within", 0), ("first TTFT p50 s", "first_s", 2), ("later TTFT p50 s", "later_s", 2),
    ("p95 s", "later_p95_s", 2), ("t/s of an agent p50", "pace", 1), ("p5", "pace_p5", 1),
    ("all t/s", "tokens_s", 1), ("makespan s", "makespan_s", 1),
    ("reader's gap p50 ms", "gap_p50_ms", 1), ("p99 ms", "gap_p99_ms", 1),
    ("reader's TTFT p50 ms", "person_ttft_ms", 0), ("others %", "others_pct", 0),
))  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """What a session adds: blocks of text of `tokens` in all, an answer, and the pause before it is sent."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int
    delay_s: float


@dataclass(frozen=True)
class Played:
    """What became of one turn. Tokens as the server counts them."""

    session: str
    turn: int
    ttft_s: float
    decode_s: float
    tokens: int
    prompt_tokens: int

    @property
    def pace(self) -> float | None:
        """Tokens/s behind the first one."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else None


Sessions = Mapping[str, Sequence[Turn]]


def sessions_of(
    rows: Sequence[Mapping[str, Any]], turns: int, context: int
) -> dict[str, list[Turn]]:
    """Return the sessions of a trace with at least two turns, cut to `turns` and to a context of so many tokens."""
    found: dict[str, list[Turn]] = defaultdict(list)
    used: dict[str, int] = defaultdict(int)
    for row in rows:
        name, tokens, answer = row["session_id"], row["input_length"], row["output_length"]
        used[name] += tokens + answer + TEMPLATE
        if len(found[name]) < turns and used[name] <= context:
            turn = Turn(tuple(row["hash_ids"]), tokens, answer, row.get("delay", 0.0) / 1e3)
            found[name].append(turn)
    return {name: each for name, each in found.items() if len(each) > 1}


def rows_of(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """Yield a line of a trace for each turn, as aiperf's ``mooncake-trace`` has them."""
    for name, turns in sessions.items():
        for turn in turns:
            row = {"session_id": name, "input_length": turn.tokens, "output_length": turn.answer}
            yield row | {"hash_ids": list(turn.blocks), "delay": 1e3 * turn.delay_s}


def text_of(turn: Turn, seed: str) -> str:
    """Return the text of a turn. A block has the same text wherever it is named."""
    words: list[str] = []
    for block in turn.blocks:
        draw = random.Random(f"{seed}/{block}")
        words += draw.choices(clients.WORDS, k=min(BLOCK, turn.tokens - len(words)))
    return clients.text(words)


def shape(context: int) -> dict[str, Any]:
    """Return what ``aiperf synthesize agentic-code`` is told: half of the context is there at the first turn.

    A quarter is shared by all sessions and an eighth by those of one project. The distributions of turns and of pauses
    are aiperf's own, with pauses of five seconds at most.
    """
    part = context / 32768
    return {
        "new_tokens_per_turn": {"mean": 2500 * part, "median": 1500 * part, "max": 6000 * part},
        "generation_length": {"mean": 300, "median": 200, "max": 600},
        "inter_turn_delay": {
            "agentic_fraction": 0.7,
            "agentic_delay": {"mean": 2500, "median": 1800, "max": 10000},
            "human_delay": {"mean": 40000, "median": 25000, "max": 120000},
            "max": 5000,
        },
        "reset": {"base_probability": 0.02, "context_scaling": 2.0},
        "max_prompt_tokens": context,
        "block_size": BLOCK,
        "cache": {
            "layer1_tokens": int(8192 * part),
            "layer1_5_tokens": int(4096 * part),
            "layer2": {"mean": 6000 * part, "median": 4000 * part, "max": 12000 * part},
            "layer1_5_groups": {"num_groups": 8, "zipf_alpha": 1.2},
        },
    }


def synthesize(program: Path, context: int, seed: int) -> list[dict[str, Any]]:
    """Have aiperf make a trace of 64 sessions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shape.json").write_text(json.dumps(shape(context)))
        command = [str(program), "synthesize", "agentic-code", "--num-sessions", "64"]
        command += ["--config", "shape.json", "--seed", str(seed), "--output", "."]
        _aiperf(command, folder)
        (made,) = folder.glob("*/dataset.jsonl")
        return [json.loads(line) for line in made.read_text().splitlines()]


# --- the client of these benchmarks ---


class ChatWire(SseWire):
    """Sends a prompt that is a JSON list of messages to ``/v1/chat/completions``, and every other one to ``/completion``."""

    def request(self, job: Job) -> bytes:
        """Return one POST; the connection closes after its answer."""
        if not job.prompt.startswith("["):
            return super().request(job)
        body = {"model": "any", "messages": json.loads(job.prompt), "max_tokens": job.max_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        sent = json.dumps(body | job.choosing).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        return head.encode() + sent

    def note(self, answer: Answer, at: float, event: dict[str, Any]) -> None:
        """Note when text came; of a chat the server counts the tokens."""
        if "choices" not in event:
            super().note(answer, at, event)
            return
        if _content(event):
            answer.times.append(at)
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]


def _content(event: Mapping[str, Any]) -> str:
    found = (choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return "".join(found)


class Agent:
    """One client that plays a session: what it has heard is part of what it sends next."""

    def __init__(
        self, live: Live, wire: ChatWire, name: str, turns: Sequence[Turn], seed: str
    ) -> None:
        self._live, self._wire, self._name, self._turns, self._seed = live, wire, name, turns, seed
        self._messages: list[dict[str, str]] = []
        self._due: float | None = live.now
        self.streams: list[Stream] = []

    def is_done(self) -> bool:
        """Send the next turn if its time has come; return whether the last was answered."""
        if self._due is not None and self._live.now >= self._due:
            turn = self._turns[len(self.streams)]
            self._due = None
            self._messages.append({"role": "user", "content": text_of(turn, self._seed)})
            job = Job(f"{self._name}-{len(self.streams)}", json.dumps(self._messages), turn.answer)
            self.streams.append(self._live.start(job, self._answered))
        return len(self.streams) == len(self._turns) and self.streams[-1].over

    def _answered(self, stream: Stream) -> None:
        text = "".join(_content(event) for _, event in self._wire.events(stream.reads))
        self._messages.append({"role": "assistant", "content": text})
        if len(self.streams) < len(self._turns):
            self._due = self._live.now + self._turns[len(self.streams)].delay_s

    def played(self) -> Iterator[Played]:
        """Yield what became of each turn. Raises :class:`NotServed` for one that failed."""
        for turn, stream in enumerate(self.streams):
            answer = clients.read_out(
                self._wire, stream.job, stream.sent, stream.reads, whole=False
            )
            if answer.error or answer.ttft_s is None or answer.completion_tokens is None:
                raise NotServed(f"{stream.job.id}: {answer.error or 'no answer'}")
            decode_s = answer.times[-1] - answer.times[0]
            tokens, prompt = answer.completion_tokens, answer.prompt_tokens or 0
            yield Played(self._name, turn, answer.ttft_s, decode_s, tokens, prompt)


def replay(live: Live, wire: ChatWire, sessions: Sessions, seed: str) -> list[Played]:
    """Play all sessions at once, with the client of these benchmarks."""
    agents = [Agent(live, wire, name, turns, seed) for name, turns in sessions.items()]

    def are_done() -> bool:
        done = [agent.is_done() for agent in agents]  # each looks at its clock
        return all(done)

    live.run(PATIENCE_S, are_done)
    return [turn for agent in agents for turn in agent.played()]


# --- aiperf ---


def find_aiperf(given: Path | None) -> Path:
    """Return the program: the one that is named, on PATH, or where ``make clients`` installs it.

    Raises:
        SystemExit: there is none.
    """
    if given is not None:
        return given
    if found := shutil.which("aiperf"):
        return Path(found)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    for installed in (cache / "uma-trio" / "clients").glob("aiperf-*/bin/aiperf"):
        return installed
    raise SystemExit(
        "there is no aiperf: `pip install aiperf`, name it by --aiperf, or play sessions that were synthesized "
        "elsewhere by --replay --sessions FILE"
    )


def _aiperf(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise NotServed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")


_TOKENIZER = """
import json, sys
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
found = json.load(open(sys.argv[1]))
vocabulary = {token: n for n, token in enumerate(found["tokens"])}
made = Tokenizer(models.BPE(vocabulary, [tuple(pair.split(" ", 1)) for pair in found["merges"]]))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=made, eos_token=found["eos"]).save_pretrained(sys.argv[2])
"""


def tokenizer(program: Path, model: Path, folder: Path) -> Path:
    """Make a tokenizer for aiperf of a model's vocabulary (byte-level BPE), so that lengths are those of the model."""
    from gguf import GGUFReader  # takes long to import

    fields = GGUFReader(model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    found = {"tokens": tokens, "merges": fields["tokenizer.ggml.merges"].contents()}
    found["eos"] = tokens[fields["tokenizer.ggml.eos_token_id"].contents()]
    source, made = folder / "vocabulary.json", folder / "tokenizer"
    source.write_text(json.dumps(found))
    _aiperf([str(program.with_name("python")), "-c", _TOKENIZER, str(source), str(made)], folder)
    return made


def profile(
    live: Live, wire: ChatWire, program: Path, model: Path, load: Sequence[str], agents: int
) -> list[Played]:
    """Have aiperf play `load` at a concurrency, while the reader reads; return what it wrote down."""
    with tempfile.TemporaryDirectory(prefix="aiperf-") as name:
        folder = Path(name)
        command = [
            str(program), "profile", "-m", "any", "--url", f"http://127.0.0.1:{wire.port}",
            "--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true",
            "--tokenizer", str(tokenizer(program, model, folder)), "--use-server-token-count",
            "--concurrency", str(agents), "--random-seed", "1", "--ui", "none",
            "--artifact-dir", str(folder), *load,
        ]  # fmt: skip
        log = folder / "output"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
        try:
            live.run(4 * PATIENCE_S, lambda: process.poll() is not None)
        finally:
            process.terminate()
            process.wait()
        records = folder / "profile_export.jsonl"
        if process.returncode or not records.exists():
            tail = log.read_text(errors="replace")[-2000:]
            raise NotServed(f"aiperf ended with {process.returncode}: {tail}")
        return [_record(json.loads(line)) for line in records.read_text().splitlines()]


def _record(row: Mapping[str, Any]) -> Played:
    about = row["metadata"]
    if row.get("error"):
        raise NotServed(f"{about['conversation_id']}: {row['error']}")
    value = {name: each["value"] for name, each in row["metrics"].items()}
    ttft_ms = value["time_to_first_token"]
    decode_ms = value["request_latency"] - ttft_ms
    tokens, prompt = value["usage_completion_tokens"], value["usage_prompt_tokens"]
    session = about["x_correlation_id"]
    return Played(session, about["turn_index"], ttft_ms / 1e3, decode_ms / 1e3, tokens, prompt)


# --- what is compared ---


@dataclass(frozen=True)
class Limits:
    """What an agent is promised."""

    ttft_s: float
    pace: float

    def keeps(self, turn: Played) -> bool:
        """Whether a turn is within the limits; a first turn may wait for its first token."""
        waits = turn.turn > 0 and turn.ttft_s > self.ttft_s
        return not waits and (turn.pace is None or turn.pace >= self.pace)


Load = Callable[[Live, ChatWire, int, str], list[Played]]
"""Plays so many agents with a seed."""


def play(
    load: Load,
    limits: Limits,
    agents: int,
    running: servers.Running,
    seed: str,
    port: int | None = None,
) -> Row:
    """Let the agents play beside a reader; return what all of them had."""
    if port is None:
        if not isinstance(running.wire, SseWire):
            raise TypeError(
                f"without a port, a server is spoken to over HTTP, not by {running.wire!r}"
            )
        port = running.wire.port
    wire = ChatWire(port)
    numbers = count()

    def ask() -> Job:
        (job,) = clients.jobs(1, QUESTION, ANSWER, f"{seed}/question/{next(numbers)}")
        return job

    with Live(wire) as live:
        reader = Endless(live, ask)
        reader.send()
        live.run(30.0, lambda: len(reader.streams) > 1)
        began = live.now
        turns = load(live, wire, agents, seed)
        seconds = live.now - began
        asked = live.answers([stream for stream in reader.streams if stream.sent >= began])
    return figures(turns, limits, seconds) | heard(asked)


def figures(turns: Sequence[Played], limits: Limits, seconds: float) -> Row:
    """Return what the agents had, by turn and session."""
    first = [turn.ttft_s for turn in turns if turn.turn == 0]
    later = [turn.ttft_s for turn in turns if turn.turn > 0]
    paces = [pace for turn in turns if (pace := turn.pace) is not None]
    kept: dict[str, bool] = {}
    for turn in turns:
        kept[turn.session] = kept.get(turn.session, True) and limits.keeps(turn)
    row: Row = {
        "within": sum(kept.values()),
        "makespan_s": seconds,
        "tokens_s": sum(turn.tokens for turn in turns) / seconds,
    }
    for name, values, q in (
        ("first_s", first, 50), ("later_s", later, 50), ("later_p95_s", later, 95),
        ("pace", paces, 50), ("pace_p5", paces, 5),
    ):  # fmt: skip
        row[name] = percentile(values, q) if values else None
    return row


def held(medians: Medians, system: System, limits: Limits) -> int:
    """Return how many agents a server holds: the most, up to the first number at which it fails."""
    most, own = 0, (system.family, system.knob)
    mine = [each for each in medians.systems if (each.family, each.knob) == own]
    for n, each in sorted(
        ((int(each.case.partition("=")[2]), each) for each in mine), key=lambda pair: pair[0]
    ):
        ttft, pace = medians(each, "later_p95_s"), medians(each, "pace_p5")
        if ttft is None or pace is None or ttft > limits.ttft_s or pace < limits.pace:
            break
        most = n
    return most


def verdicts(limits: Limits, medians: Medians) -> Iterator[str]:
    """Yield how many agents each server holds."""
    named = {system.name: system for system in medians.systems}
    for name, system in named.items():
        yield (
            f"{name} holds {held(medians, system, limits)} agents at {limits.pace:g} tokens/s and "
            f"a TTFT of {limits.ttft_s:g} s in later turns"
        )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--agents",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="N",
        help="at once (1 2 4 8 16)",
    )
    add(
        "--context", type=int, default=32768, metavar="N", help="tokens of a whole session (32,768)"
    )
    add("--turns", type=int, default=8, metavar="N", help="of a session at most (8)")
    add("--pace", type=float, default=20.0, metavar="X", help="tokens/s of an agent (20)")
    add(
        "--ttft",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds to a later turn's first token (2)",
    )
    add("--aiperf", type=Path, metavar="PROGRAM", help="aiperf (on PATH, or by make clients)")
    add(
        "--replay",
        action="store_true",
        help="play the sessions with the client of these benchmarks",
    )
    add("--sessions", type=Path, metavar="FILE", help="sessions that were synthesized before")
    add("--synthesize", type=Path, metavar="FILE", help="write sessions to a file, and end")
    add(
        "--scenario",
        action="store_true",
        help="aiperf's AgentX scenario, with traces from huggingface.co",
    )
    peer_arguments(parser, PEER_FLAGS)


_DRY = [
    {"session_id": str(n), "input_length": 40, "output_length": 4, "hash_ids": [10 * n + turn]}
    for n in range(2)
    for turn in range(2)
]


def load_of(given: argparse.Namespace, here: Here) -> Load:
    """Return what plays the agents, as the options say."""
    if given.scenario:
        flags = ["--scenario", "inferencex-agentx-mvp", "--public-dataset", TRACES]
        flags += ["--max-context-length", str(given.context), "--benchmark-duration", "900"]
        program = find_aiperf(given.aiperf)
        return lambda live, wire, n, _seed: profile(live, wire, program, here.model, flags, n)
    if given.dry_run:
        rows = _DRY
    elif given.sessions is not None:
        rows = [json.loads(line) for line in given.sessions.read_text().splitlines()]
    else:
        rows = synthesize(find_aiperf(given.aiperf), given.context, here.seed)
    sessions = list(sessions_of(rows, given.turns, given.context).items())
    if len(sessions) < max(given.agents):
        raise SystemExit(f"{len(sessions)} sessions are too few for {max(given.agents)} agents")
    if given.dry_run or given.replay:
        return lambda live, wire, n, seed: replay(live, wire, dict(sessions[:n]), seed)
    program = find_aiperf(given.aiperf)

    def by_aiperf(live: Live, wire: ChatWire, n: int, _seed: str) -> list[Played]:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows_of(dict(sessions[:n])))
            file.flush()
            trace = ["--custom-dataset-type", "mooncake-trace", "--input-file", file.name]
            trace += ["--num-sessions", str(n), "--no-fixed-schedule"]
            return profile(live, wire, program, here.model, trace, n)

    return by_aiperf


@scene(arguments)
def agentx(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server at each number of agents."""
    if given.dry_run:
        given.agents, given.context = [1, 2], 1024
    if given.synthesize is not None:
        rows = synthesize(find_aiperf(given.aiperf), given.context, here.seed)
        given.synthesize.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        raise SystemExit(0)
    load, limits = load_of(given, here), Limits(given.ttft, given.pace)
    found: list[System] = []
    folder = here.peers
    for n in given.agents:
        once = partial(play, load, limits, n)
        # Of random weights an answer is text that takes more tokens when it is read than when it was written.
        slot = -(-9 * given.context // (8 * 256)) * 256
        setup = servers.Setup(here.model, here.threads, slot * (n + 1), n + 1)
        port, case = servers.free_port(), f"agents={n}"
        ours = partial(servers.ours, setup, "--speculation", "off", "--http", str(port))
        found.append(contest.serving(OURS, "", ours, partial(once, port=port), case))
        if folder is None:
            continue
        for text in given.peer_flags:
            flags = servers.peer_flags(text.format(slots=n + 1), n + 1)
            peer = partial(servers.llama_server, folder, setup, flags)
            knob = text.replace("-np {slots}", "").strip()  # one system for all numbers of agents
            found.append(contest.serving(PEER, knob, peer, once, case))
    client = "the client of these benchmarks" if given.replay or given.dry_run else "aiperf"
    return Comparison(
        found,
        seconds=100,
        minutes=90,
        repetitions=1,
        tables=[_TABLE],
        facts={
            "client": client,
            "sessions": f"at most {given.turns} turns, {given.context} tokens",
        },
        progress=lambda row: (
            f"{cell(row.get('within'), 0)} within, later TTFT p95 {cell(row.get('later_p95_s'), 2)} s, "
            f"pace p5 {cell(row.get('pace_p5'), 1)}"
        ),
        verdicts=partial(verdicts, limits),
        curves=("TTFT p95 of later turns, s", "later_p95_s", ("agents", "s")),
    )
