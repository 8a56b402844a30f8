"""Processes for work of a client's size: bounded by the kernel, killed without harm to the daemon.

A *host* is a fresh interpreter that imports little, prepares once what all its workers need, and forks
a *worker* for each piece of work. A worker has limits on CPU time, wall time and memory that the
kernel enforces, so that a library which never returns, or holds the interpreter's lock, ends there.
Host and workers end with the daemon. Nothing is started before the first worker.

:mod:`.workers` is the daemon's side, :mod:`.host` the other side, :mod:`.link` the frames between them.
"""
