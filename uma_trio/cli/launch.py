"""`uma-trio launch PROGRAM ...`: run a program that speaks the API of OpenAI, Anthropic or Ollama to the daemon here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, NoReturn

from uma_trio.cli.attempt import answer_of
from uma_trio.cli.output import UNREACHABLE, USAGE, complain
from uma_trio.cli.parser import Parameter
from uma_trio.config.errors import ConfigError
from uma_trio.config.http import DEFAULT_PORT
from uma_trio.sockets.address import LOCALHOST, Address
from uma_trio.words import nearest

#: Tokens of context below which agents fail at once or forget what they do: what their documents ask for, or their first request has.
_NEEDED: Final = {
    "claude": 32_768,
    "codex": 16_384,
    "opencode": 16_384,
    "goose": 16_384,
    "qwen": 16_384,
    "aider": 8192,
}
_NO_KEY = "none"  # clients refuse to start without any
_OURS = ("UMA_SOCKET", "UMA_SOCK", "UMA_HTTP", "UMA_HTTP_KEY_FILE", "UMA_CONFIG")
_PATIENCE_S = 5.0
_NO_PROXY = ("NO_PROXY", "no_proxy")
_LOOPBACK = (LOCALHOST, "localhost", "::1")


def launch(
    *program: Annotated[str, Parameter(help="The program to run, with its arguments.", rest=True)],
    http: Annotated[
        str | None,
        Parameter(
            help="The daemon's HTTP address; by default the one that the running daemon says. Environment: UMA_HTTP.",
            metavar="[HOST:]PORT",
        ),
    ] = None,
    http_key_file: Annotated[
        str | None, Parameter(help="The daemon's key file; the first key is used.", metavar="FILE")
    ] = None,
) -> int:
    """Run a program with OPENAI_BASE_URL, ANTHROPIC_BASE_URL, OLLAMA_HOST and the like set to the daemon.

    Flags before the program belong to uma-trio; everything after it belongs to the program.
    """
    if not program:
        complain("Name a program to run, as in: uma-trio launch aider --model openai/local")
        return USAGE
    from uma_trio.config import settings

    others = {*settings.known_env()} - {*_OURS}
    env = {name: text for name, text in os.environ.items() if name not in others}
    given = {"http": http, "http_key_file": http_key_file}
    config = settings.load(given, env)
    if "http" not in config.sources:
        config = settings.load({**_http_settings(config.socket), **_given(given)}, env)
    address = config.http_address
    if address is None:
        complain("The daemon here serves no HTTP: start it with --http PORT.")
        return UNREACHABLE
    if address.path:
        complain(
            "Programs need a TCP port: start the daemon with --http PORT, not with a Unix socket."
        )
        return USAGE
    if (why := unreachable(address)) is not None:
        complain(f"No daemon at {address.url}: {why}")
        return UNREACHABLE
    if shutil.which(program[0]) is None:
        guess = nearest(program[0], _NEEDED)
        complain(f"There is no program {program[0]}{guess}; check its name and PATH.")
        return USAGE
    more = environment(address, config.http_key_file, os.environ)
    if not is_welcome(address, more["OPENAI_API_KEY"]):
        what = "another key" if config.http_key_file else "a key"
        complain(f"The daemon at {address.url} requires {what}: name its file by --http-key-file.")
        return USAGE
    if (warning := short_context(program[0], address, more["OPENAI_API_KEY"])) is not None:
        complain(warning)
    return _become(program, more)


def _given(flags: Mapping[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in flags.items() if text is not None}


def _http_settings(socket: Path) -> dict[str, str]:
    """Return where the running daemon serves HTTP, as it says itself; nothing if none runs."""
    overview = answer_of(socket, lambda client: client.overview())
    found = {} if overview is None else overview.settings or {}
    return {name: found[name] for name in ("http", "http_key_file") if name in found}


def short_context(program: str, address: Address, key: str) -> str | None:
    """Return a warning if a request of this program does not fit the daemon's context; None if it does, or if neither is known."""
    needed = _NEEDED.get(Path(program).name)
    if needed is None:
        return None
    connection = HTTPConnection(address.host, address.port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/props", headers={"Authorization": f"Bearer {key}"})
        found = json.load(connection.getresponse())["default_generation_settings"]["n_ctx"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None
    finally:
        connection.close()
    if not isinstance(found, int) or found >= needed:
        return None
    return (
        f"{program} begins with about {needed:,} tokens, and a request to this daemon may have {found:,}. Restart it with a larger "
        "--n-ctx or fewer slots (--parallel), or with a model that was trained for more."
    )


def _become(program: tuple[str, ...], more: dict[str, str]) -> NoReturn:
    os.execvpe(program[0], program, {**os.environ, **more})  # noqa: S606


def environment(
    address: Address, key_file: Path | None, inherited: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the variables by which programs find an API, by every name they have for it.

    A proxy of the `inherited` environment is not to be asked for an address of this machine.
    """
    from uma_trio.http.settings import KeyFileUnusable, read_keys

    try:
        keys = (_NO_KEY.encode(),) if key_file is None else read_keys(key_file)
    except KeyFileUnusable as error:
        raise ConfigError(str(error)) from error
    base, key = f"{address.url}/v1", keys[0].decode("latin-1")
    return {
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address.url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "OLLAMA_HOST": address.url,
        "OLLAMA_API_KEY": key,
        **(_without_proxy(address.host, inherited) if address.is_loopback else {}),
    }


def _without_proxy(host: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the hosts for which programs use no proxy: those that are listed, and this machine's.

    Some programs read only one spelling of the name, and many write `localhost` for an address of ours.
    """
    listed = ",".join(inherited.get(name, "") for name in _NO_PROXY).split(",")
    hosts = [*(name.strip() for name in listed if name.strip()), host, *_LOOPBACK]
    # All hosts; curl and Python understand that only where it stands alone.
    value = "*" if "*" in hosts else ",".join(dict.fromkeys(hosts))
    return dict.fromkeys(_NO_PROXY, value)


def unreachable(address: Address) -> str | None:
    """Return why no daemon serves HTTP at an address, and what to do; None if one does."""
    connection = HTTPConnection(address.host, address.port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except ConnectionRefusedError:
        http = "" if address.port == DEFAULT_PORT else f" --http {_typed(address)}"
        return f"nothing listens there. Start it: uma-trio serve{http}"
    except TimeoutError:
        return (
            f"it says nothing for {_PATIENCE_S:.0f} s. Look at what listens there, or restart it."
        )
    except (OSError, HTTPException) as error:
        return f"{error or type(error).__name__}. Check the address."
    finally:
        connection.close()
    if status in (200, 503):
        return None
    return f"something else answers there, /health with {status}. Choose another --http."


def is_welcome(address: Address, key: str) -> bool:
    """Whether the daemon accepts this key; True if it cannot be reached, which the program will report."""
    connection = HTTPConnection(address.host, address.port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        refusals = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)  # without a key, of another user
        return connection.getresponse().status not in refusals
    except (OSError, HTTPException):
        return True
    finally:
        connection.close()


def _typed(address: Address) -> str:
    """Return an address as it is given to --http."""
    url = address.url.removeprefix("http://")
    return str(address.port) if address.host == LOCALHOST else url
