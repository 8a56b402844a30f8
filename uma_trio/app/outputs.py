"""Files that the daemon writes: trace, scorecard, saved prefixes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.engine.cells import PrefixDisk
from uma_trio.observe import log
from uma_trio.observe.catalogue import COLUMNS
from uma_trio.observe.table_file import AnotherTable, TableFile
from uma_trio.policy.costing.store import cache_folder


def check_trace(config: Config) -> None:
    """Check before models are loaded that the trace can be written. Raises :class:`ConfigError`."""
    path = config.trace
    if path is None:
        return
    if path.is_dir():
        fault = errno.EISDIR
    elif not path.parent.is_dir():
        fault = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        fault = errno.EACCES
    else:
        return
    raise unwritable(config, "trace", os.strerror(fault))


def unwritable(config: Config, name: str, why: str) -> ConfigError:
    """Return the error for the file of the setting `name`, which cannot be written."""
    file = f"{config.source(name)} {getattr(config, name)}"
    return ConfigError(f"{file}: {why}; name a file that can be written")


@contextmanager
def scorecard_file(config: Config) -> Iterator[TableFile | None]:
    """Open the table of the scorecard, if it is configured, until the block ends. Raises :class:`ConfigError`."""
    if config.scorecard is None:
        yield None
        return
    try:
        file = TableFile(config.scorecard, COLUMNS)
    except OSError as error:
        raise unwritable(config, "scorecard", error.strerror or str(error)) from error
    except AnotherTable as error:
        message = f"{config.source('scorecard')} {config.scorecard}: {error}; name another file"
        raise ConfigError(message) from error
    with closing(file):
        yield file


def open_prefix_disk(config: Config, credentials: Mapping[str, bytes]) -> PrefixDisk | None:
    """Open the files of saved prefixes, if they are configured and that is possible; owners prove themselves by `credentials`.

    Blocks on the disk. Raises :class:`ConfigError`.
    """
    if not config.prefix_disk:
        return None
    if all(each.prefix_ram == 0 for each in config.each()):
        option = f"{config.source('prefix_disk')} {config.prefix_disk}"
        raise ConfigError(f"{option}: it needs saved prefixes in memory (--prefix-ram)")
    folder = cache_folder("prefix")
    try:
        return PrefixDisk(folder, config.prefix_disk, credentials)
    except OSError as error:
        why = error.strerror or str(error)
        log.get("prefix").warning(
            "no prefixes on disk (--prefix-disk)", folder=str(folder), why=why
        )
        return None
