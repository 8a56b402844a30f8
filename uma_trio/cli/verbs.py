"""The verbs of `uma-trio` and what each is for. Each is a function in a module of the same name."""

from __future__ import annotations

from collections.abc import Mapping

ABOUT = "One machine, one model in memory, many applications."
VERBS: Mapping[str, str] = {
    "serve": "Load the model and serve it on a Unix socket, until Ctrl-C.",
    "stop": "Stop the daemon, after its running requests.",
    "service": "Run the daemon as a service of this user: install, status, logs, and so on.",
    "logs": "Show what the service logged, and what comes.",
    "pull": "Fetch a model from Hugging Face's hub.",
    "models": "List the models on this machine, and which of them fit.",
    "load": "Have the daemon load a configured model.",
    "unload": "Have the daemon unload a configured model that nobody uses.",
    "chat": "Talk with the model in the terminal.",
    "run": "Send one prompt and print the answer as it comes.",
    "embed": "Print the vectors of texts.",
    "rerank": "Print documents by how well they fit a query.",
    "ps": "Show the requests in progress.",
    "top": "Watch requests, the batch, memory and models.",
    "priority": "Move a request to the interactive or the background lane.",
    "explain": "Show how the latest requests spent their time, or why one waited.",
    "prefix": "Show, clear or pin what the daemon keeps of your prompts.",
    "metrics": "Show the daemon's figures, once or repeatedly.",
    "launch": "Run a program that speaks OpenAI's API against the daemon's HTTP port.",
    "replay": "Plan every tick of a trace again, and say whether the plans are the same.",
    "simulate": "Compare policies in virtual time, on a modelled machine.",
    "cluster": "Place requests on several machines: init, check, up, status, drain, add, remove, simulate.",
    "doctor": "Look for what would keep the daemon from running, or from running fast.",
    "completion": "Print the completion of commands and flags for a shell, or install it.",
    "demo": "Start a private daemon and watch four clients stream at once.",
}
#: Verbs of other distributions, and the extra that installs each.
EXTRAS: Mapping[str, str] = {"replay": "sim", "simulate": "sim", "cluster": "cluster"}


def module_of(verb: str) -> str:
    """Return the name of the module that a verb is in."""
    if (extra := EXTRAS.get(verb)) is not None:
        return f"uma_trio_{extra}.commands.{verb}"
    return f"uma_trio.cli.{verb}"
