"""One thread that carries frames to and from all workers of this process."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from uma_trio.confined.link import HEAD, MOST_BYTES, framed

_PIECE: Final = 1 << 18


class WorkerGone(Exception):
    """The worker has ended; the message is the reason, such as :data:`.workers.OUT_OF_CPU` or a signal."""


class FrameSocket:
    """The daemon's end of a socket. `send` never waits, from any thread."""

    def __init__(
        self, post: Post, sock: socket.socket, got: Callable[[bytes | None], None]
    ) -> None:
        self.sock = sock
        self.got = got
        self.out: deque[tuple[bytes, int | None]] = deque()
        self.left = bytearray()
        self.asked_to_close = False
        self.ended = False
        self._post = post

    def send(self, payload: bytes, fd: int | None = None) -> None:
        """Send a frame, in order, as soon as the other side takes it; `fd` is passed with it and closed."""
        self.out.append((framed(payload), fd))
        self._post.look_at(self)

    def close(self) -> None:
        """Close it, on the thread of the post."""
        self.asked_to_close = True
        self._post.look_at(self)


class Post:
    """The thread. It is started by the first line, and ends with the process or `close`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a line may be closed by the collector, anywhere
        self._news: deque[FrameSocket] = deque()
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._closed = False

    def line(self, sock: socket.socket, got: Callable[[bytes | None], None]) -> FrameSocket:
        """Return a line on `sock`, which is the post's from now on.

        `got` is called on the post's thread with each frame, and last with None once the other
        side has closed, or `close` was called.
        """
        sock.setblocking(False)
        line = FrameSocket(self, sock, got)
        self.look_at(line)
        return line

    def look_at(self, line: FrameSocket) -> None:
        """Have the thread see to a line."""
        self._news.append(line)
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
                self._thread.start()
        with suppress(OSError):  # full: it is awake
            self._wake.send(b"x")

    def close(self) -> None:
        """Have the thread end every line, and then itself. Waits for neither."""
        with self._lock:
            self._closed = True
            if self._thread is None:
                self._close()
        with suppress(OSError):
            self._wake.send(b"x")

    def _close(self) -> None:
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        while not self._closed:
            for key, events in self._selector.select():
                line = key.data
                if line is None:
                    with suppress(OSError):
                        self._woken.recv(4096)
                    while self._news:
                        self._see_to(self._news.popleft())
                elif not line.ended and not self._carried(line, events):
                    self._end(line)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        while self._news:
            self._end(self._news.popleft())
        self._close()

    def _carried(self, line: FrameSocket, events: int) -> bool:
        """Read and write without blocking; False if the other side has closed, or sends invalid frames."""
        try:
            return (not events & selectors.EVENT_READ or self._read(line)) and (
                not events & selectors.EVENT_WRITE or self._write(line)
            )
        except Exception:  # of one socket: the others must not be affected
            logging.getLogger(__name__).exception("the socket of a worker has failed")
            return False

    def _see_to(self, line: FrameSocket) -> None:
        if line.ended:
            _close([fd for _, fd in line.out if fd is not None])
            line.out.clear()
            return
        if line.asked_to_close:
            self._end(line)
            return
        if line.sock.fileno() not in self._selector.get_map():
            self._selector.register(line.sock, selectors.EVENT_READ, line)
        if not self._write(line):
            self._end(line)

    def _write(self, line: FrameSocket) -> bool:
        """Send without blocking; False if the other side has closed."""
        while line.out:
            data, fd = line.out.popleft()
            fds = [] if fd is None else [fd]
            try:
                sent = socket.send_fds(line.sock, [data], fds) if fds else line.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                _close(fds)
                return False
            if sent:
                _close(fds)
                fd = None
            if sent < len(data):
                line.out.appendleft((data[sent:], fd))
                break
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.out else 0)
        if self._selector.get_key(line.sock).events != wanted:
            self._selector.modify(line.sock, wanted, line)
        return True

    def _read(self, line: FrameSocket) -> bool:
        """Deliver complete frames; False if the other side has closed."""
        try:
            data = line.sock.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        line.left += data
        while len(line.left) >= HEAD.size:
            (n_bytes,) = HEAD.unpack_from(line.left)
            if n_bytes > MOST_BYTES:
                return False
            end = HEAD.size + n_bytes
            if len(line.left) < end:
                break
            frame = bytes(line.left[HEAD.size : end])
            del line.left[:end]
            line.got(frame)
        return True

    def _end(self, line: FrameSocket) -> None:
        if line.ended:
            return
        line.ended = True
        if line.sock.fileno() in self._selector.get_map():
            self._selector.unregister(line.sock)
        line.sock.close()
        _close([fd for _, fd in line.out if fd is not None])
        line.out.clear()
        line.got(None)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
