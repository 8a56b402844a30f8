"""The verbs of `uma-trio`: where each is implemented, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

ABOUT = "One machine, its models in memory once, many applications."
GROUPS: Final = ("Serve", "Models", "Ask", "Watch", "Machine")


class Verb(NamedTuple):
    """A verb: the `function` (by default of the verb's name) in a `module`, under a heading of the help.

    `extra` is the optional dependency that installs it.
    """

    module: str
    group: str
    about: str
    function: str = ""
    extra: str = ""


def _verb(group: str, module: str, about: str, function: str = "") -> Verb:
    return Verb(f"uma_trio.cli.{module}", group, about, function)


VERBS: Final[Mapping[str, Verb]] = {
    "serve": _verb("Serve", "serve", "Load the model and serve it, until Ctrl-C."),
    "stop": _verb("Serve", "stop", "Stop the daemon after its running requests, or unload one model."),
    "service": _verb("Serve", "service", "Run the daemon as a service of this user."),
    "logs": _verb("Serve", "service", "Show the log of a daemon that runs in the background."),
    "models": _verb("Models", "models", "List the models on this machine, which fit and which are served."),
    "pull": _verb("Models", "pull", "Download a model from Hugging Face."),
    "load": _verb("Models", "load", "Load a configured model in the daemon."),
    "unload": _verb("Models", "load", "Unload a configured model that no request uses."),
    "list": _verb("Models", "models", "The same as models.", "list_models"),
    "show": _verb("Models", "models", "Describe one model."),
    "rm": _verb("Models", "models", "Delete a downloaded model, after a confirmation.", "remove"),
    "run": _verb("Ask", "run", "Send one prompt and print the answer as it is generated."),
    "chat": _verb("Ask", "chat", "Chat in the terminal."),
    "embed": _verb("Ask", "encode", "Print the vectors of texts."),
    "rerank": _verb("Ask", "encode", "Rank documents by how well they fit a query."),
    "launch": _verb("Ask", "launch", "Run a program that speaks OpenAI's API against the daemon."),
    "ps": _verb("Watch", "ps", "Show the requests in progress."),
    "top": _verb("Watch", "top", "Watch requests, the batch, memory and models."),
    "explain": _verb("Watch", "explain", "Show how requests spent their time, or why one waited."),
    "metrics": _verb("Watch", "metrics", "Show the daemon's metrics, once or repeatedly."),
    "priority": _verb("Watch", "ps", "Move a request to the interactive or the background lane."),
    "prefix": _verb("Watch", "prefix", "List, clear or pin the cached prefixes of your prompts."),
    "doctor": _verb("Machine", "doctor", "Find what keeps the daemon from running, or from running fast."),
    "demo": _verb("Machine", "demo", "Start a private daemon and watch four clients stream at once."),
    "completion": _verb("Machine", "completion", "Print or install the completion for a shell."),
    "help": _verb("Machine", "reference", "Describe a command, every setting or every metric.", "show_help"),
    "replay": Verb("uma_trio_sim.commands.replay", "Machine", "Plan every tick of a trace again and compare the plans.", extra="sim"),
    "simulate": Verb("uma_trio_sim.commands.simulate", "Machine", "Compare policies in virtual time.", extra="sim"),
    "cluster": Verb("uma_trio_cluster.commands.cluster", "Machine", "Place requests on several machines, with HAProxy.", extra="cluster"),
}  # fmt: skip

SYNONYMS: Final = {
    "ls": "list", "delete": "rm", "remove": "rm", "download": "pull", "start": "serve", "kill": "stop", "quit": "stop",
    "status": "ps", "info": "show", "generate": "run", "ask": "run", "log": "logs", "bench": "demo", "benchmark": "demo",
    "config": "help config", "version": "--version", "install": "service install",
}  # fmt: skip
"""Names of other programs for our verbs."""


def is_installed(verb: Verb) -> bool:
    """Whether the distribution of a verb is installed."""
    return not verb.extra or find_spec(verb.module.partition(".")[0]) is not None
