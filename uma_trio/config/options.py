"""Every option of the daemon, declared once: flag, environment, YAML key, default, bounds, help.

How the places it may come from are joined is :mod:`uma_trio.config.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_type_hints

import attrs
from attrs import frozen

from uma_trio.backend.kv_types import KV_TYPES, kv_type_name
from uma_trio.config.http import HttpConfig
from uma_trio.config.option import Option, n_bytes, option, options_of, seconds, show
from uma_trio.sockets.path import DEFAULT_SOCKET

FLASH_ATTENTION = ("auto", "on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
LogLevel = Literal["debug", "info", "warning", "error"]

_MIB = 1 << 20


def _kv_type(raw: object) -> object:
    text = str(raw).strip().lower()
    if text in {"q6", "q6_0", "q6_k"}:
        message = (
            f"a KV cache type that llama.cpp has (q6 exists for weights only); "
            f"it has {', '.join(KV_TYPES)}"
        )
        raise ValueError(message)
    try:
        return kv_type_name(text)
    except ValueError as error:
        raise ValueError(f"one of {', '.join(KV_TYPES)}, or a pair: {error}") from None


def _bandwidth(raw: object) -> object:
    """Read ``320GBps``, ``320 GB/s`` or a bare number of GB/s; ``probed`` is the default.

    Bits, as in ``320Gbps``, are refused rather than taken for eight times as many bytes.
    """
    if not isinstance(raw, str):
        return raw
    if raw.strip().endswith(("Gbps", "Gb/s")):
        raise ValueError("a number of bytes, but of bits: 40GBps and 40 GB/s are bytes")
    text = raw.strip().lower()
    if text in ("probed", "auto"):
        return None
    for unit in ("gbps", "gb/s"):
        text = text.removesuffix(unit).strip()
    return text


def _log_level(raw: object) -> object:
    text = str(raw).strip().lower()
    return {"warn": "warning", "err": "error"}.get(text, text)


@frozen(kw_only=True)
class Config(HttpConfig):
    """What the daemon runs with. Build it with :func:`uma_trio.config.settings.load`, or by hand in tests."""

    model: Path | None = option(
        None,
        flag="--model",
        env=("UMA_MODEL",),
        shown_default="the bundled model",
        metavar="PATH",
        since="0.1",
        help="The GGUF file to load, once, for every client.",
    )
    socket: Path = option(
        Path(DEFAULT_SOCKET),
        flag="--socket",
        env=("UMA_SOCK",),
        yaml=("ipc.uds_path",),
        metavar="PATH",
        since="0.1",
        help="The Unix domain socket to serve on.",
    )
    n_ctx: int = option(
        4096,
        flag="--n-ctx",
        env=("UMA_N_CTX",),
        minimum=16,
        maximum=1 << 24,
        unit="tokens",
        since="0.1",
        help="KV cells, shared by all requests. One request may use no more than this or "
        "the length the model was trained for, whichever is smaller.",
    )
    parallel: int = option(
        8,
        flag="--parallel",
        env=("UMA_N_SEQ",),
        minimum=1,
        maximum=256,
        unit="slots",
        since="0.1",
        help="How many requests run at once; the others wait in the queue.",
    )
    threads: int | None = option(
        None,
        flag="--threads",
        env=("UMA_THREADS",),
        minimum=1,
        maximum=512,
        shown_default="physical cores",
        since="0.1",
        help="CPU threads of llama.cpp.",
    )
    max_sessions: int = option(
        32,
        flag="--max-sessions",
        env=("UMA_MAX_SESSIONS",),
        yaml=("limits.max_sessions",),
        minimum=1,
        maximum=65_536,
        unit="connections",
        since="0.1",
        help="Client connections at once; one more is answered E_LIMIT_002 and closed.",
    )
    max_queue: int = option(
        256,
        flag="--max-queue",
        yaml=("limits.max_queue",),
        minimum=1,
        maximum=1_000_000,
        unit="requests",
        since="0.1",
        help="Requests that may wait for a slot; one more is answered E_LIMIT_003.",
    )
    max_prompt_bytes: int = option(
        65_536,
        flag="--max-prompt-bytes",
        env=("UMA_MAX_PROMPT_BYTES",),
        yaml=("limits.max_prompt_bytes",),
        minimum=1,
        maximum=_MIB,
        unit="bytes",
        since="0.1",
        help="The longest prompt; a longer one is answered E_LIMIT_001.",
    )
    max_tokens: int = option(
        512,
        flag="--max-tokens",
        minimum=1,
        maximum=1 << 24,
        unit="tokens",
        since="0.1",
        help="What a request gets that names no max_tokens; trimmed to the room left in "
        "the context.",
    )
    max_tokens_cap: int | None = option(
        None,
        flag="--max-tokens-cap",
        yaml=("limits.max_tokens",),
        minimum=1,
        maximum=1 << 24,
        shown_default="the context",
        unit="tokens",
        since="0.1",
        help="The most tokens a request may ask for.",
    )
    tick_budget_ms: float = option(
        30.0,
        flag="--tick-budget-ms",
        yaml=("scheduler.tick_budget_ms",),
        minimum=1,
        maximum=60_000,
        unit="ms",
        since="0.1",
        help="How long one tick should take when prompts are waiting (baseline policy).",
    )
    policy: str = option(
        "deadline",
        flag="--policy",
        yaml=("scheduler.policy",),
        metavar="NAME",
        since="0.1",
        help="The scheduling policy: deadline, baseline, or another package's by its entry "
        "point's name. A part is left out by -PART behind a comma: deadline,-stairs.",
    )
    latency_cap: float = option(
        1.2,
        flag="--latency-cap",
        minimum=1.01,
        maximum=1000,
        since="0.1",
        help="How many times longer an interactive stream's p95 inter-token latency may be while other "
        "work runs (deadline policy).",
    )
    pause_cap: float = option(
        4.0,
        flag="--pause-cap",
        minimum=1.01,
        maximum=1000,
        since="0.1",
        help="How many times longer a single inter-token latency may be, once a stream is 3 s old; "
        "before that it is 2 (deadline policy, and only beside a newcomer's prompt).",
    )
    playout_ms: float = option(
        300.0,
        flag="--playout-ms",
        minimum=0,
        maximum=10_000,
        unit="ms",
        since="0.1",
        help="How long after it was computed a token is shown at most: a stream that was computed ahead "
        "comes evenly while other work takes its turn (deadline policy). 0 shows each at once. A "
        "request with `pace` asap is never held.",
    )
    background_floor: float = option(
        0.05,
        flag="--background-floor",
        minimum=0,
        maximum=0.9,
        since="0.1",
        help="The part of machine time that background work gets at least: a smaller --latency-cap than "
        "1 / (1 - floor) is that (deadline policy).",
    )
    interactive_prompt: int = option(
        512,
        flag="--interactive-prompt",
        minimum=0,
        maximum=1 << 24,
        unit="tokens",
        since="0.1",
        help="How much of an interactive prompt is computed first, and readers' tokens may be late for it; the rest "
        "of a longer prompt is scheduled as background work (deadline policy).",
    )
    interactive_priority: float = option(
        10.0,
        flag="--interactive-priority",
        yaml=("qos.interactive.priority",),
        above=0,
        maximum=1e6,
        since="0.1",
        help="How many parts the interactive lane gets of what is left beside running streams, for "
        "each one of the background lane's (deadline policy).",
    )
    bmt_budget: float | None = option(
        None,
        flag="--bmt-budget",
        env=("UMA_BMT_BUDGET",),
        yaml=("bmt_budget_gbps",),
        read=_bandwidth,
        above=0,
        shown_default="probed",
        unit="GB/s",
        since="0.1",
        help="Memory bandwidth that ticks may use, such as 320GBps; background work is trimmed "
        "to stay within it (deadline policy).",
    )
    kv_type: str = option(
        "f16",
        flag="--kv-type",
        read=_kv_type,
        metavar="TYPE",
        since="0.1",
        help="How the KV cache is stored: f16, f32, bf16, q8_0, q5_0, q5_1, q4_0, q4_1 or iq4_nl, or "
        "K and V apart, as in k=q8_0,v=f16. V quantised needs flash attention, K alone does not. q8, "
        "q5 and q4 mean q8_0, q5_0 and q4_0.",
    )
    flash_attention: str = option(
        "auto",
        flag="--flash-attention",
        choices=FLASH_ATTENTION,
        since="0.1",
        help="Whether llama.cpp's flash attention is used. On a CPU it is several times slower "
        "for few tokens that look far back, so auto leaves it out there, unless the KV cache is "
        "quantised, which needs it; where many requests fill one cache it can be quicker.",
    )
    prefix_ram: int | None = option(
        None,
        flag="--prefix-ram",
        env=("UMA_PREFIX_RAM",),
        yaml=("prefix.ram",),
        read=n_bytes,
        metavar="BYTES",
        minimum=0,
        maximum=1 << 50,
        shown_default="a tenth of the memory, at most 2 GiB",
        since="0.1",
        help="Memory for beginnings of prompts that were computed before, such as 512MiB; all of it "
        "counts. 0 keeps none, in the KV cache either (docs/MEMORY.md).",
    )
    session_ttl_s: float = option(
        300.0,
        flag="--session-ttl",
        yaml=("prefix.session_ttl_s",),
        read=seconds,
        metavar="TIME",
        minimum=0,
        maximum=86_400,
        unit="s",
        since="0.1",
        help="How long what a request with a `session` computed is kept before all else.",
    )
    mlock: bool = option(
        False,
        flag="--mlock",
        env=("UMA_USE_MLOCK",),
        since="0.1",
        help="Lock the model in memory, so that it is never paged out.",
    )
    mmap: bool = option(
        True,
        flag="--mmap",
        env=("UMA_USE_MMAP",),
        since="0.1",
        help="Map the model file instead of reading it; starts faster and shares pages.",
    )
    gpu_layers: int = option(
        -1,
        flag="--gpu-layers",
        minimum=-1,
        maximum=10_000,
        shown_default="all",
        unit="layers",
        since="0.1",
        help="Layers to put on the GPU, if llama.cpp was built for one; -1 is all of them.",
    )
    idle_timeout_s: float = option(
        300.0,
        flag="--idle-timeout",
        env=("UMA_IDLE_TIMEOUT_SEC",),
        yaml=("limits.idle_timeout_s",),
        read=seconds,
        metavar="TIME",
        above=0,
        maximum=31_536_000,
        unit="s",
        since="0.1",
        help="Close a connection on which nothing ran and nothing came for this long.",
    )
    drain_s: float = option(
        20.0,
        flag="--drain",
        read=seconds,
        metavar="TIME",
        minimum=0,
        maximum=86_400,
        unit="s",
        since="0.1",
        help="On SIGTERM, how long running requests may go on before they are ended.",
    )
    trace: Path | None = option(
        None,
        flag="--trace",
        yaml=("logging.trace",),
        shown_default="none",
        metavar="FILE",
        since="0.1",
        help="Write every tick to this file, as lines of JSON that `uma-trio replay` plans again. "
        "It holds no text; a file of that name is overwritten.",
    )
    scorecard: Path | None = option(
        None,
        flag="--scorecard",
        yaml=("logging.scorecard",),
        shown_default="none",
        metavar="FILE",
        since="0.1",
        help="Append a line of figures to this file each --scorecard-interval: tokens/s, latencies, bytes "
        "moved, memory. It is CSV, or lines of JSON if its name ends in .jsonl or .ndjson; the "
        "columns are in docs/METRICS.md.",
    )
    scorecard_interval_s: float = option(
        5.0,
        flag="--scorecard-interval",
        yaml=("logging.scorecard_interval_s",),
        read=seconds,
        metavar="TIME",
        minimum=0.1,
        maximum=86_400,
        unit="s",
        since="0.1",
        help="How long a time each line of the scorecard is about, and the one in the metrics.",
    )
    log_level: LogLevel = option(
        "info",
        flag="--log-level",
        env=("UMA_LOG_LEVEL", "UMA_DEBUG"),
        yaml=("logging.level",),
        choices=LOG_LEVELS,
        read=_log_level,
        metavar="LEVEL",
        since="0.1",
        help="How much is logged. UMA_DEBUG=1 is the same as UMA_LOG_LEVEL=debug.",
    )

    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    """Where each setting that is not a default was written, by its field's name."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens_cap is not None and self.max_tokens > self.max_tokens_cap:
            # Somebody who lowers the cap alone means "no answer is longer", so the default,
            # which nobody typed, gives way.
            object.__setattr__(self, "max_tokens", self.max_tokens_cap)

    def source(self, name: str) -> str:
        """Return where the setting was written, for a message: a flag, a variable, a file's key."""
        (item,) = (item for item in OPTIONS if item.name == name)
        return self.sources.get(name, item.flag)

    def describe(self) -> dict[str, str]:
        """Return every setting as text, by its flag's name: for a log line or a bug report."""
        return {
            item.flag.removeprefix("--"): show(getattr(self, item.name))
            if getattr(self, item.name) is not None
            else item.default_text
            for item in OPTIONS
        }


# Strings rather than Literal: the choices are the option's, checked once in `Option.check`.
_HINTS = get_type_hints(Config) | {"log_level": str}
# Those of replies and of HTTP, which Config inherits, are shown behind its own.
_INHERITED = {field.name for field in attrs.fields(HttpConfig)}
OPTIONS: tuple[Option, ...] = tuple(
    sorted(options_of(Config, _HINTS), key=lambda item: item.name in _INHERITED)
)


CONFIG_FLAG = "--config"
CONFIG_ENV = "UMA_CONFIG"
ENV_PREFIX = "UMA_"


def replace(config: Config, **changes: object) -> Config:
    """Return `config` with some fields changed, checked against the same bounds."""
    for item in OPTIONS:
        if item.name in changes:
            item.check(changes[item.name], item.name)
    return attrs.evolve(config, **changes)  # type: ignore[arg-type]  # checked by name above
