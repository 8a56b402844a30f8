"""The examples of the README, run as they stand there."""

import asyncio
import pathlib
import re
import socket
import threading

import pytest

from uma_protocol import Generate

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = {
    name: block
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for name in re.findall(r"# example: (\w+)", block)
}
WORDS = ["Once", " upon", " a", " time"]
ASK = Generate("readme", prompt="p")


def _load(name):
    """What an example defines; its `main` is not run, since it wants a daemon."""
    namespace = {"__name__": name}
    exec(compile(EXAMPLES[name], f"README.md ({name})", "exec"), namespace)  # noqa: S102
    return namespace


@pytest.fixture(name="client")
def _client():
    """One end of a socket pair, at whose other end the README's server answers in a thread."""
    client, server = socket.socketpair()
    thread = threading.Thread(target=_load("server")["serve"], args=(server, WORDS), daemon=True)
    thread.start()
    yield client
    client.close()
    thread.join(5)
    server.close()


def test_every_block_of_python_is_an_example():
    """No code in the README goes untested."""
    assert set(EXAMPLES) == {"sockets", "asyncio", "trio", "server"}
    assert README.count("```python") == len(EXAMPLES)


def test_plain_sockets(client):
    """The blocking example yields the text."""
    assert "".join(_load("sockets")["stream"](client, ASK)) == "".join(WORDS)


def test_asyncio(client):
    """The asyncio example yields the text."""

    async def main():
        reader, writer = await asyncio.open_connection(sock=client)
        pieces = [text async for text in _load("asyncio")["stream"](reader, writer, ASK)]
        writer.close()
        await writer.wait_closed()
        return pieces

    assert "".join(asyncio.run(main())) == "".join(WORDS)


def test_trio(client):
    """The trio example shows the text; it alone needs trio to be there."""
    trio = pytest.importorskip("trio")
    shown = []

    async def main():
        async with trio.SocketStream(trio.socket.from_stdlib_socket(client)) as transport:
            await _load("trio")["stream"](transport, ASK, shown.append)

    trio.run(main)
    assert "".join(shown) == "".join(WORDS)


def test_a_refusal_reaches_the_caller(client):
    """The example turns an error event into an exception that says code and reason."""
    stream = _load("sockets")["stream"]

    class Refused:
        """A socket whose outgoing request is spoilt on the way."""

        recv = client.recv

        @staticmethod
        def sendall(data):
            client.sendall(data.replace(b"prompt", b"promtp"))

    with pytest.raises(RuntimeError, match=r"E_PROTO_003.*did you mean prompt"):
        list(stream(Refused, ASK))


def test_a_daemon_that_goes_away_is_noticed():
    """End of file before the terminal event is an error, not an end."""
    client, server = socket.socketpair()
    with client:
        server.close()
        stream = _load("sockets")["stream"]

        class Unheard:
            """A socket on which writing still works when nobody reads."""

            recv = client.recv

            @staticmethod
            def sendall(data):
                pass

        with pytest.raises(ConnectionError):
            list(stream(Unheard, ASK))
