"""Entry points of `uma-trio`, `umad` and `uma-cli`, and their exit statuses.

Exit statuses: 0 ok; 1 bad arguments; for clients 2 the server refused, 3 it could not be reached or
understood, 74 the answer could not be written, 130 Ctrl-C; for the daemon 2 unusable model, 70 engine
died, 75 the socket belongs to another daemon. `replay` and `simulate` end as `diff` does: 1 a
difference, 2 any trouble.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from uma_trio.cli.output import (
    CANNOT_WRITE,
    INTERRUPTED,
    OK,
    REFUSED,
    USAGE,
    complain,
    discard_output,
    is_write_error,
    prepare_streams,
    program,
)
from uma_trio.cli.parser import WrongArguments, run_verb, run_verbs
from uma_trio.cli.verbs import VERBS
from uma_trio.config.errors import ConfigError


def main() -> None:
    """Run `uma-trio`."""
    sys.exit(status_of(lambda: run_verbs(program(), sys.argv[1:])))


def umad() -> None:
    """Run `umad`: `uma-trio serve`, with or without the word."""
    from uma_trio.cli.serve import serve

    given = sys.argv[1:]
    arguments = given[given[:1] == ["serve"] :]
    sys.exit(status_of(lambda: run_verb("umad", "serve", serve, arguments)))


def uma_cli() -> None:
    """Run `uma-cli`: `uma-trio run`, the prompt sent as it is."""
    from uma_trio.cli.run import cli

    sys.exit(status_of(lambda: run_verb("uma-cli", "run", cli, sys.argv[1:])))


def status_of(run: Callable[[], object]) -> int:
    """Run a command and return its exit status; report known errors in one sentence."""
    prepare_streams()
    try:
        status = run()
        sys.stdout.flush()
    except ConfigError as error:
        complain(str(error))
        return USAGE
    except WrongArguments as error:
        complain(str(error))
        verb = VERBS.get(error.verb)
        return REFUSED if verb is not None and verb.extra == "sim" else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left, as in `| head`.
        discard_output()
        return 128 + 13
    except OSError as error:
        if not is_write_error(error):
            raise
        complain(f"Standard output cannot be written: {error.strerror}.")
        discard_output()
        return CANNOT_WRITE
    return status if isinstance(status, int) else OK


if __name__ == "__main__":
    main()
