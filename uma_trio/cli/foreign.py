"""Flags of other servers, and what is meant by them here.

People type the flags of llama-server, Ollama and vLLM by habit. An unknown flag that stands in one of these
tables is answered with ours and a sentence, or with why there is none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Meant(NamedTuple):
    """What a foreign flag is here: our flag, "" if there is none, and a sentence about it."""

    flag: str
    why: str
    takes_value: bool = True


def _named(table: Iterable[tuple[str, Meant]]) -> Mapping[str, Meant]:
    return {name: meant for names, meant in table for name in names.split()}


_MODEL = Meant("--model", "a GGUF file, or a name that `uma-trio models` lists.")
_FETCH = Meant("", "Fetch the model first: `uma-trio pull {}`, then --model NAME.")
_KEYS = Meant("", "Keys are read from a file, where `ps` does not show them: --http-key-file FILE.")
_KV = Meant("--kv-type", "one type for K and V.")
_ALWAYS = Meant("", "It is always on; omit the flag.", takes_value=False)
_BATCH = Meant(
    "", "The policy chooses the size of each batch; --tick-budget-ms bounds the time of one."
)

_REQUEST = Meant(
    "",
    "Each request sets it; `defaults` of a model are for those that do not: `uma-trio help config`.",
)
_STAYS = Meant("", "The model stays in memory until the daemon stops.")

SERVE: Mapping[str, Meant] = _named(
    (
        ("-m --model-path", _MODEL),
        ("-hf -hfr --hf-repo -mu --model-url -hff --hf-file", _FETCH),
        (
            "--port --http-port",
            Meant("--http", "the HTTP APIs are served on this port of this machine."),
        ),
        ("--host", Meant("--http", "the address that HTTP is served on: HOST:PORT.")),
        (
            "-c --ctx-size --ctx --max-model-len --num-ctx",
            Meant("--n-ctx", "the KV cells, shared by all requests."),
        ),
        (
            "-ngl --n-gpu-layers --ngl --num-gpu",
            Meant("--gpu-layers", "the layers that go to the GPU; by default all that fit."),
        ),
        (
            "-np --max-num-seqs --num-parallel",
            Meant("--parallel", "the requests that run at once."),
        ),
        ("-t -tb --threads-batch", Meant("--threads", "the CPU threads of llama.cpp.")),
        ("-n --n-predict --predict", Meant("--max-tokens", "the length of an answer.")),
        ("-fa --flash-attn", Meant("--flash-attention", "auto, on or off.")),
        ("-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype", _KV),
        (
            "-md --model-draft",
            Meant("", "Tokens are drafted from texts, not by a model: --speculation."),
        ),
        ("--api-key", _KEYS),
        ("--api-key-file", Meant("--http-key-file", "a file with keys, one a line.")),
        ("-a --served-model-name", Meant("--alias", "the name of the model in the HTTP APIs.")),
        ("--chat-template", Meant("--chat-template-file", "a file with a Jinja template.")),
        ("-b -ub --batch-size --ubatch-size --max-num-batched-tokens", _BATCH),
        ("-cb --cont-batching --jinja --metrics --slots --props", _ALWAYS),
        ("--enable-prefix-caching --cache-prompt", _ALWAYS),
        ("--cache-ram -cram", Meant("--prefix-ram", "the memory for saved prefixes.")),
        (
            "--slot-save-path",
            Meant("--prefix-disk", "how many bytes of files, in the cache folder."),
        ),
        (
            "-v --verbose --log-verbose",
            Meant("--log-level debug", "it logs every step.", takes_value=False),
        ),
        ("--timeout -to", Meant("", "A request ends with its client; --idle-timeout is ours.")),
        ("--keep-alive --keepalive", _STAYS),
        (
            "--temp --temperature --top-k --top-p --min-p --seed --repeat-penalty --presence-penalty",
            _REQUEST,
        ),
    )
)

_DAEMON = Meant("", "It is a setting of the daemon; see `uma-trio serve --help`.")

CHAT: Mapping[str, Meant] = _named(
    (
        ("-m", Meant("--model", "which of the daemon's models answers.")),
        ("-n --n-predict --predict --num-predict", Meant("--max-tokens", "an answer's length.")),
        ("-s", Meant("--seed", "the seed of the draws.")),
        ("-sys --system-prompt", Meant("--system", "the system message.")),
        ("-c --ctx-size --num-ctx -ngl --n-gpu-layers -t --threads -np --parallel", _DAEMON),
        ("--host --port", Meant("--socket", "the path of the daemon's socket.", takes_value=False)),
        ("--keep-alive --keepalive", _STAYS),
    )
)
RUN: Mapping[str, Meant] = {
    **CHAT,
    **_named(
        (
            ("-p", Meant("--prompt", "or give the prompt as words.")),
            ("-f --file", Meant("", "Give the prompt on standard input: uma-trio run < {}.")),
            ("-j --json-schema", Meant("--schema", "a file with a JSON Schema.")),
            ("--grammar-file", Meant("--grammar", "a file with a grammar, GBNF or Lark.")),
            ("--format", Meant("", "--schema FILE holds the JSON Schema that an answer matches.")),
            ("--repeat-last", Meant("--repeat-last-n", "the tokens that count as recent.")),
            ("-v --verbose", Meant("--json", "the answer with its figures.", takes_value=False)),
        )
    ),
}

_WATCH = Meant("", "`uma-trio top` refreshes the picture; metrics has --watch.", takes_value=False)
PS: Mapping[str, Meant] = _named((("--watch -w --follow -f", _WATCH),))

TABLES: Mapping[str, Mapping[str, Meant]] = {"serve": SERVE, "run": RUN, "chat": CHAT, "ps": PS}


def suggestion(verb: str, flag: str, arguments: Sequence[str]) -> str:
    """Return a sentence with our flag for a foreign one that `verb` was given; "" if there is none.

    The value that follows the flag in `arguments` is written behind ours, to be copied.
    """
    table = TABLES.get(verb, {})
    name, _, behind = _whole(flag, arguments, table).partition("=")
    meant = table.get(name)
    if meant is None:
        return ""
    value = ""
    if meant.takes_value:
        value = _translated(name, behind or _value_of(name, arguments), arguments)
    quoted = shlex.quote(value) if value else ""
    if not meant.flag:
        return meant.why.replace("{}", quoted or "NAME")
    return f"Use {meant.flag} {quoted}".rstrip() + f": {meant.why}"


def _whole(flag: str, arguments: Sequence[str], table: Mapping[str, Meant]) -> str:
    """Return the argument that a flag of one letter is the beginning of: -ngl, which click reads as -n -g -l."""
    if len(flag) != 2:
        return flag
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("-") and not name.startswith("--") and flag[1] in name and name in table:
            return argument
    return flag


def model_hint(verb: str, words: Sequence[str]) -> str:
    """Return how to name a model, where `serve` was given words that are no flags; else ""."""
    if verb != "serve" or len(words) != 1:
        return ""
    return f" Name the model with --model {shlex.quote(words[0])}."


def _translated(name: str, value: str, arguments: Sequence[str]) -> str:
    """Return the value for our flag; a host and a port are one address here."""
    if name not in ("--host", "--port", "--http-port"):
        return value
    host = value if name == "--host" else _value_of("--host", arguments)
    port = _value_of("--port", arguments) if name == "--host" else value
    if not host:
        return port
    return f"[{host}]:{port or 'PORT'}" if ":" in host else f"{host}:{port or 'PORT'}"


def _value_of(name: str, arguments: Sequence[str]) -> str:
    """Return what follows a flag, or stands behind its "="; "" if nothing does."""
    for at, argument in enumerate(arguments):
        if argument == name:
            following = arguments[at + 1 : at + 2]
            return following[0] if following and not following[0].startswith("--") else ""
        if argument.startswith(f"{name}="):
            return argument[len(name) + 1 :]
    return ""
