"""Every option of the daemon, declared once: flag, environment, YAML key, default, bounds, help.

How the places it may come from are joined is :mod:`uma_trio.config.settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, get_type_hints

import attrs
from attrs import frozen

from uma_trio.backend.kv_types import KV_TYPES, kv_type_name
from uma_trio.config.adapters import read_adapters
from uma_trio.config.http import HttpConfig
from uma_trio.config.models import LOADS, ON_DEMAND, ModelSpec
from uma_trio.config.option import Option, n_bytes, option, options_of, seconds, show
from uma_trio.sockets.address import parse_framed
from uma_trio.sockets.path import DEFAULT_TEXT, SHARED_SOCKET
from uma_trio.sockets.token import DEFAULT_TEXT as TOKEN_TEXT
from uma_trio.words import BY_BACKEND, MIB, SPECULATIONS, Gives

FLASH_ATTENTION = ("auto", "on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
LogLevel = Literal["debug", "info", "warning", "error"]

MAX_ALIAS = 256
#: Requests at once unless `--parallel` says otherwise: of an editor, a terminal, a browser, some agents.
SLOTS: Final = 8


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
        raise ValueError(f"a KV cache type: {error}") from None


def _aliases(raw: object) -> tuple[str, ...]:
    """Read names: of repeated flags, of a list in YAML, or of one text with commas."""
    given = raw if isinstance(raw, list | tuple) else [raw]
    if not all(isinstance(each, str | int | float) for each in given):
        raise ValueError("a name, or a list of names")
    names = [name.strip() for each in given for name in str(each).split(",")]
    if not all(0 < len(name) <= MAX_ALIAS and name.isprintable() for name in names):
        raise ValueError(f"a name of 1 to {MAX_ALIAS} printable characters")
    return tuple(dict.fromkeys(names))


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


def _folders(raw: object) -> object:
    """Read folders: of repeated flags, of a list in YAML, or one."""
    return raw if isinstance(raw, list | tuple) else (raw,)


def _socket(raw: object) -> object:
    """Read a path, or an address of TCP."""
    if isinstance(raw, str):
        parse_framed(raw)
    return raw


def _log_level(raw: object) -> object:
    text = str(raw).strip().lower()
    return {"warn": "warning", "err": "error"}.get(text, text)


@frozen(kw_only=True)
class Config(HttpConfig):
    """What the daemon runs with. Build it with :func:`uma_trio.config.settings.load`, or by hand in tests."""

    model: Path | None = option(
        None,
        shown_default="the bundled model",
        metavar="MODEL",
        several=True,
        help="The model to load: a GGUF file, or a name that `uma-trio models` lists. May be repeated: the `model` of "
        "a request chooses, and the first that generates text answers requests without one. A model of vectors or"
        " scores may be one of them, or the only one. The section `models` of the settings file has names and "
        "settings for each.",
    )
    load: str = option(
        "start",
        choices=LOADS,
        metavar="WHEN",
        help="When models besides the first are loaded: at the start; on-demand, by the first request, which waits; "
        "explicit, by `uma-trio load`. A model's own `load` precedes this.",
    )
    model_dir: tuple[Path, ...] = option(
        (),
        read=_folders,
        shown_default="none",
        metavar="FOLDER",
        help="A folder in which models are looked for by name, besides the caches of Hugging Face, Ollama "
        "and LM Studio; may be given several times.",
    )
    lora: tuple[str, ...] = option(
        (),
        read=read_adapters,
        shown_default="none",
        metavar="[NAME=]FILE[:SCALE]",
        help="A LoRA adapter of the first --model, as a GGUF file; may be repeated. Requests use it as the model "
        "MODEL:NAME or by the field `lora`, with this scale or their own. Models of the section `models` have "
        "their own.",
    )
    lora_contexts: int = option(
        2,
        within=(1, 64, "contexts"),
        help="The number of variants of a model with adapters that are loaded at once, each with --n-ctx tokens. "
        "Requests for another one wait until one is idle.",
    )
    socket: Path = option(
        Path(SHARED_SOCKET),
        older_env=("UMA_SOCK",),
        read=_socket,
        shown_default=DEFAULT_TEXT,
        metavar="PATH",
        help="The path of the Unix socket, or tcp:127.0.0.1:PORT, whose clients show the token of --token-file. A "
        "daemon on the default path also serves on /tmp/uma.sock if that is free.",
    )
    token_file: Path | None = option(
        None,
        shown_default=TOKEN_TEXT,
        metavar="FILE",
        help="The file with the token that clients of --socket tcp:... show. It is made, readable by this "
        "user only, if it is not there; clients read it.",
    )
    n_ctx: int | None = option(
        None,
        within=(16, 1 << 24, "tokens"),
        shown_default="from the model and the free memory",
        help="The KV cells of all requests together. A request may use the context that the model was trained for, and"
        " with --kv-layout streams its slot's share. By default every slot gets the former, at most 131,072 tokens on a GPU and 32,768 on"
        " a CPU, as far as memory suffices: a GPU without 1.5 GiB, or half of what is free in the machine, beside the weights of all models.",
    )
    parallel: int | None = option(
        None,
        within=(1, 256, "slots"),
        shown_default=f"{SLOTS}, fewer if memory is short",
        help="The number of requests that run at once; further requests wait in the queue. By default 8; 4 if each would have fewer than "
        "8,192 tokens, and 2 or 1 if fewer than 4,096.",
    )
    n_cpu_moe: int | None = option(
        None,
        within=(0, 10_000, "layers"),
        shown_default="as many as do not fit",
        help="Of a mixture of experts on a GPU: for how many layers, the first ones, the experts' weights stay in the machine's memory "
        "and are computed by the CPU.",
    )
    threads: int | None = option(
        None,
        within=(1, 512),
        shown_default="physical cores",
        help="The number of CPU threads of llama.cpp.",
    )
    max_sessions: int = option(
        32,
        within=(1, 65_536, "connections"),
        help="The maximum number of client connections. For a further one an idle one is closed; if "
        "all are at work, it may only ask an operator's questions, or gets E_LIMIT_002.",
    )
    max_queue: int = option(
        256,
        within=(1, 1_000_000, "requests"),
        help="The maximum number of requests that wait for a slot. A further request is answered "
        "with E_LIMIT_003.",
    )
    max_prompt_bytes: int = option(
        65_536,
        within=(1, MIB, "bytes"),
        help="The maximum length of a prompt. A longer prompt is answered with E_LIMIT_001.",
    )
    max_tokens: int = option(
        512,
        within=(1, 1 << 24, "tokens"),
        help="The max_tokens of requests on the socket and of llama-server completions that set none. Chats over HTTP "
        "have no limit but the context.",
    )
    max_tokens_cap: int | None = option(
        None,
        within=(1, 1 << 24, "tokens"),
        shown_default="the context",
        help="The largest max_tokens that a request may ask for.",
    )
    tick_budget_ms: float = option(
        30.0,
        within=(1, 60_000, "ms"),
        help="The target time of a tick while prompts are waiting (baseline policy).",
    )
    policy: str = option(
        "deadline",
        metavar="NAME",
        help="The scheduling policy: deadline, baseline, or the name of another package's entry point.",
    )
    latency_cap: float = option(
        1.2,
        within=(1.01, 1000),
        help="The limit on the p95 inter-token latency of an interactive stream while other work "
        "runs, as a multiple of its latency without other work (deadline policy).",
    )
    pause_cap: float = option(
        4.0,
        within=(1.01, 1000),
        help="The limit on one inter-token latency while a new prompt is computed, as a multiple of that without other"
        " work, for streams older than 3 s; for younger ones it is 2 (deadline policy).",
    )
    reading_pace: float = option(
        40.0,
        within=(0, 10_000, "ms"),
        help="Other work delays a token of a stream with a reader to at most this time after the token before, or "
        "--latency-cap times its latency alone if that is longer. Faster streams are not slowed down. 0: by "
        "--latency-cap only (deadline policy).",
    )
    playout_ms: float = option(
        600.0,
        within=(0, 10_000, "ms"),
        help="The longest time that a computed token is held back. While other work is computed, tokens of a stream "
        "that is ahead are sent at even intervals (deadline policy). 0 sends each token at once, as requests with"
        " `pace` asap get them.",
    )
    background_floor: float = option(
        0.05,
        within=(0, 0.9),
        help="The minimum share of machine time for background work, which raises a --latency-cap below 1 / (1 - "
        "floor). With 0 background requests may wait for a slot forever (deadline policy).",
    )
    interactive_prompt: int = option(
        512,
        within=(0, 1 << 24, "tokens"),
        help="The part of an interactive prompt that is computed first, for which tokens of streams may be late. The "
        "rest of a longer prompt is background work (deadline policy).",
    )
    interactive_priority: float = option(
        10.0,
        above=0,
        maximum=1e6,
        help="The share of the interactive lane in the machine time that running streams leave, "
        "relative to a share of 1 for the background lane (deadline policy).",
    )
    bmt_budget: float | None = option(
        None,
        read=_bandwidth,
        above=0,
        shown_default="probed",
        unit="GB/s",
        help="The memory bandwidth that ticks may use, such as 320GBps. Background work is reduced "
        "to stay within it (deadline policy).",
    )
    kv_type: str = option(
        "f16",
        read=_kv_type,
        metavar="TYPE",
        help="The type of the KV cache: f16, f32, bf16, q8_0, q5_0, q5_1, q4_0, q4_1 or iq4_nl, or one each for K and "
        "V, as in k=q8_0,v=f16. A quantised V needs flash attention.",
    )
    llama: str = option(
        "auto",
        metavar="BUILD",
        help="The build of llama.cpp: uma_trio_llama (packaged), llama_cpp (llama-cpp-python), or a folder with "
        "libllama and ggml's libraries of the same commit. auto: llama_cpp if compiled for a GPU, else "
        "uma_trio_llama, else llama_cpp.",
    )
    kv_layout: str = option(
        "auto",
        choices=("auto", "streams", "unified"),
        help="streams: each of the --parallel slots has --n-ctx / --parallel tokens, and attention spans its own only."
        " unified: one request may use all of --n-ctx, and attention spans all. auto: streams if a slot has 4,096"
        " tokens or more and the model allows it.",
    )
    flash_attention: str = option(
        "auto",
        choices=FLASH_ATTENTION,
        help="Whether to use llama.cpp's flash attention; auto: wherever the backend can. A quantised V needs it. "
        "Some older CPUs are faster without it. Without it a lone answer with a seed can be repeated exactly.",
    )
    prefix_ram: int | None = option(
        None,
        read=n_bytes,
        metavar="BYTES",
        within=(0, 1 << 50),
        shown_default="a tenth of the memory, at most 2 GiB; 16 GiB beside a GPU",
        help="The memory for saved prefixes, such as 512MiB, including bookkeeping. 0 disables the "
        "prefix cache, also in the KV cache.",
    )
    prefix_disk: int = option(
        0,
        read=n_bytes,
        metavar="BYTES",
        within=(0, 1 << 50),
        shown_default="0, none",
        help="The size of the files for saved prefixes in the cache folder, such as 8GiB, from which conversations "
        "continue after a restart. They contain tokens of prompts and answers. A prefix larger than --prefix-ram "
        "is not written.",
    )
    session_ttl_s: float = option(
        300.0,
        read=seconds,
        metavar="TIME",
        within=(0, 86_400, "s"),
        help="How long the prefix of a request with a `session` is pinned in the prefix cache.",
    )
    mlock: bool = option(False, help="Lock the model in memory, so that it is never paged out.")
    mmap: bool = option(
        True,
        help="Map the model file instead of reading it. This starts faster and shares pages between "
        "processes.",
    )
    gpu_layers: int = option(
        -1,
        within=(-1, 10_000, "layers"),
        shown_default="all",
        help="The number of layers to place on the GPU, if llama.cpp was built for one; -1 means "
        "all.",
    )
    idle_timeout_s: float = option(
        300.0,
        read=seconds,
        metavar="TIME",
        above=0,
        maximum=31_536_000,
        unit="s",
        help="Close a connection after this time without a running request and without a byte "
        "received.",
    )
    drain_s: float = option(
        20.0,
        read=seconds,
        metavar="TIME",
        within=(0, 86_400, "s"),
        help="How long running requests may continue after SIGTERM before they are ended.",
    )
    trace: Path | None = option(
        None,
        shown_default="none",
        metavar="FILE",
        help="Write every tick to this file, as lines of JSON that `uma-trio replay` can plan again. "
        "The trace contains no text. An existing file is overwritten.",
    )
    scorecard: Path | None = option(
        None,
        shown_default="none",
        metavar="FILE",
        help="Append a line of figures to this file every --scorecard-interval, as CSV, or as JSON if the name ends in"
        " .jsonl or .ndjson. `uma-trio help metrics` describes the columns.",
    )
    scorecard_interval_s: float = option(
        5.0,
        read=seconds,
        metavar="TIME",
        within=(0.1, 86_400, "s"),
        help="The length of the interval that a line of the scorecard, and the scorecard in the "
        "metrics, covers.",
    )
    log_level: LogLevel = option(
        "info",
        older_env=("UMA_DEBUG",),
        choices=LOG_LEVELS,
        read=_log_level,
        metavar="LEVEL",
        help="The least severe level that is logged. UMA_DEBUG=1 is the same as UMA_LOG_LEVEL=debug.",
    )

    models: tuple[ModelSpec, ...] = ()
    """Further models; the first of them is the default one where `model` is not given."""

    model_ttl_s: float | None = None
    """Of one model, as :meth:`each` returns it: how long it stays loaded without a request."""

    model_pin: bool = False
    """Of one model: whether it stays loaded when another model needs memory."""

    model_gives: Gives | None = None
    """Of one model: what it has to make of texts; None: whatever its file says."""

    is_variant: bool = False
    """Of one model: whether it is another one with adapters."""

    model_hidden: bool = False
    """Of one model: whether it is left out of lists."""

    defaults: Mapping[str, float] = attrs.field(factory=dict)
    """Of one model: how tokens are chosen where a request does not say, by the names of its fields."""

    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    """Where each setting that is not a default was written, by its field's name."""
    shape_cpu_s: float = option(
        2.0,
        read=seconds,
        metavar="TIME",
        within=(0.1, 10, "s"),
        help="The CPU time for compiling one schema, grammar or expression, and for a token of a grammar that runs in "
        "a process of its own. More is refused.",
    )
    shape_memory: int = option(
        64 << 20,
        read=n_bytes,
        metavar="BYTES",
        within=(16 << 20, 16 << 30),
        help="The memory that compiling or following one schema, grammar or expression may take, such "
        "as 64MiB. One that takes more is refused.",
    )
    embedding_model: Path | None = option(
        None,
        shown_default="none",
        metavar="MODEL",
        help="A further model that makes vectors of texts (/v1/embeddings, `uma-trio embed`), on the CPU: a GGUF file "
        "of a BERT kind (bge, nomic-embed, MiniLM, e5) or of Qwen3-Embedding, or a name that `uma-trio models` "
        "lists.",
    )
    rerank_model: Path | None = option(
        None,
        shown_default="none",
        metavar="MODEL",
        help="A further model that scores documents for a query (/v1/rerank, `uma-trio rerank`): a GGUF file of "
        "bge-reranker, jina-reranker or Qwen3-Reranker, or a name that `uma-trio models` lists.",
    )
    encoder_ttl_s: float | None = option(
        None,
        shown_default="they stay",
        read=seconds,
        metavar="TIME",
        within=(1, 31_536_000, "s"),
        help="How long the models of --embedding-model and --rerank-model stay in memory without a request: "
        "then they are loaded by the first request, which waits for it.",
    )
    alias: tuple[str, ...] = option(
        (),
        read=_aliases,
        shown_default="the name of the model's file",
        metavar="NAME",
        help="A further name of the model for requests; may be repeated, or with commas. /v1/models and answers to "
        "requests without a name use the first.",
    )
    chat_template_file: Path | None = option(
        None,
        shown_default="the template in the model's file",
        metavar="FILE",
        help="A file with the Jinja template that chats are rendered by, instead of the model's own. "
        "`uma-trio doctor --template FILE` tells about it.",
    )
    reasoning: str = option(
        "on",
        choices=("on", "off", "template"),
        help="Whether the model reasons where a request says nothing of it, if its chat template can "
        "be told; template leaves it to the template.",
    )
    reply_format: Path | None = option(
        None,
        shown_default="derived from the model's template",
        metavar="FILE",
        help="A JSON file with the model's format of tool calls and reasoning, if the format cannot "
        "be derived. `uma-trio doctor --template` prints the derived one.",
    )
    speculation: str = option(
        BY_BACKEND,
        choices=(BY_BACKEND, *SPECULATIONS),
        help="Speculative decoding: draft tokens from earlier text and verify them in one batch. off; free: only if "
        "the tick takes no longer; auto: also if it raises tokens per second; default: auto on a CPU, off on a "
        "GPU. Nothing is drafted with CUDA graphs, or for a request with a seed unless it asks.",
    )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens_cap is not None and self.max_tokens > self.max_tokens_cap:
            # A lower cap alone means that no answer is longer, so that it replaces the default.
            object.__setattr__(self, "max_tokens", self.max_tokens_cap)

    @property
    def cells(self) -> int:
        """Tokens of the context. Known once the model has been fitted to the memory (uma_trio/models/files.py)."""
        if self.n_ctx is None:
            raise ValueError("the context of this model has not been chosen yet")
        return self.n_ctx

    @property
    def slots(self) -> int:
        """Requests that run at once, as configured or chosen; the usual number before that."""
        return self.parallel or SLOTS

    def each(self) -> tuple[Config, ...]:
        """Return the configuration of each model that is loaded, the default one first."""
        encoders = tuple(self._encoders())
        if not self.models and not encoders:
            return (self,)
        is_own = self.model is not None or not self.models
        own = (attrs.evolve(self, model_pin=True),) if is_own else ()
        return (*own, *(self._with(spec) for spec in self.models), *encoders)

    def _encoders(self) -> Iterator[Config]:
        """Yield the configuration of each model of `--embedding-model` and `--rerank-model`."""
        stays = self.encoder_ttl_s is None
        asked: tuple[tuple[Path | None, Gives], ...] = (
            (self.embedding_model, "vectors"),
            (self.rerank_model, "scores"),
        )
        for path, gives in asked:
            if path is not None:
                yield attrs.evolve(
                    self,
                    model=path,
                    model_gives=gives,
                    alias=(),
                    lora=(),
                    load=LOADS[0] if stays else ON_DEMAND,
                    model_ttl_s=self.encoder_ttl_s,
                    model_pin=stays,
                )

    def _with(self, spec: ModelSpec) -> Config:
        found: Config = attrs.evolve(
            self,
            alias=spec.names,
            load=spec.load or self.load,
            model_ttl_s=spec.ttl_s,
            model_pin=spec.pinned,
            model_hidden=spec.hidden,
            defaults=spec.defaults,
            **{"lora": (), **spec.settings},  # type: ignore[arg-type]  # structured
        )
        if self.trace is None or (self.model is None and spec is self.models[0]):
            return found
        name = "".join(each if each.isalnum() else "-" for each in spec.name)
        return attrs.evolve(
            found, trace=self.trace.with_name(f"{self.trace.stem}-{name}{self.trace.suffix}")
        )

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


def replace(config: Config, **changes: object) -> Config:
    """Return `config` with some fields changed, checked against the same bounds."""
    for item in OPTIONS:
        if item.name in changes:
            item.check(changes[item.name], item.name)
    return attrs.evolve(config, **changes)  # type: ignore[arg-type]  # checked by name above


GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "model", "load", "model_dir", "llama", "threads", "gpu_layers", "n_cpu_moe", "flash_attention", "mlock", "mmap", "alias",
        "chat_template_file", "reasoning", "reply_format", "lora", "lora_contexts", "embedding_model", "rerank_model",
        "encoder_ttl_s",
    ),
    "Clients": (
        "socket", "token_file", "max_sessions", "max_queue", "max_prompt_bytes", "max_tokens", "max_tokens_cap",
        "idle_timeout_s", "drain_s", "shape_cpu_s", "shape_memory",
    ),
    "KV cache": ("n_ctx", "parallel", "kv_layout", "kv_type", "prefix_ram", "prefix_disk", "session_ttl_s"),
    "Scheduling": (
        "policy", "latency_cap", "reading_pace", "pause_cap", "playout_ms", "background_floor", "interactive_prompt",
        "interactive_priority", "bmt_budget", "tick_budget_ms",
    ),
    "Speculative decoding": ("speculation",),
    "HTTP": (
        "http", "http_users", "http_key_file", "http_admin_key_file", "http_host", "http_origin", "http_strict",
        "http_reasoning", "http_max_prompt_bytes", "http_max_connections", "http_trusted_proxy", "agent",
    ),
    "Logs and records": ("log_level", "trace", "scorecard", "scorecard_interval_s"),
}  # fmt: skip
"""Under which heading the help and the reference show each option."""

ESSENTIAL: Final = frozenset({
    "model", "model_dir", "alias", "load", "embedding_model", "rerank_model", "socket", "max_tokens", "n_ctx", "parallel",
    "kv_type", "prefix_ram", "gpu_layers", "threads", "latency_cap", "speculation", "http", "http_key_file", "log_level",
})  # fmt: skip
"""The options that `serve --help` shows; `--help-all` shows all."""


def grouped() -> Mapping[str, tuple[Option, ...]]:
    """Return the options under each heading, in the order in which they are shown."""
    named = {item.name: item for item in OPTIONS}
    return {heading: tuple(named[name] for name in names) for heading, names in GROUPS.items()}
