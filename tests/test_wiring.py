"""Options as the parts of the daemon get them."""

from __future__ import annotations

from pathlib import Path

from uma_trio.app.wiring import bounds, model_info
from uma_trio.config.options import Config
from uma_trio_sim.fake import CHATML, FakeBackend


def test_a_template_in_a_file_replaces_the_models() -> None:
    """Everybody who asks for the template gets that one; without a file nothing changes."""
    backend = FakeBackend()
    assert model_info(Config(), backend).chat_template == CHATML


def test_a_given_template_is_read(tmp_path: Path) -> None:
    """As it stands."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    found = model_info(Config(chat_template_file=file), FakeBackend())
    assert found.chat_template == file.read_text()


def test_the_name_of_the_file_stays_a_name() -> None:
    """The first alias is what clients are told; requests may use all of them."""
    backend = FakeBackend()
    file = backend.model.name
    plain = bounds(Config(), backend)
    assert (plain.model, plain.aliases) == (file, ())
    named = bounds(Config(alias=("a", "b")), backend)
    assert (named.model, named.aliases) == ("a", ("b", file))
    assert all(map(named.names, ("a", "b", file)))
    assert not named.names("c")
