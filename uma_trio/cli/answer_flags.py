"""The flags that say how one answer is to be made: those of `run`, `uma-cli` and `chat`.

The annotations are evaluated here: parsers evaluate those that are text where a class inherits them.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from attrs import fields_dict, frozen

from uma_trio.cli.files import json_of, text_of
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import SocketFlag, StartFlag, WaitFlag
from uma_trio.config.errors import ConfigError
from uma_trio.words import Awaits, Lane, Pace, Speculation


@frozen(kw_only=True)
class AnswerFlags:
    """What is asked of an answer, whether it is the only one or one of a conversation."""

    system: Annotated[
        str | None, Parameter(help="A system message; with run and uma-cli it implies --chat.")
    ] = None
    max_tokens: Annotated[
        int | None,
        Parameter(
            help="The maximum number of tokens of the answer; default: the daemon's --max-tokens."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Parameter(
            name=("--temperature", "--temp"),
            help="The sampling temperature; default: the model's, or 0, which always takes the most likely token.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(
            help="Sample from the most likely tokens whose probabilities sum to this; 1 is off; "
            "default: the model's, or 1."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Parameter(
            help="Sample from this many most likely tokens; 0 is off; default: the model's, or 0."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(
            help="Leave out tokens with less than this share of the most likely token's probability; 0 "
            "is off; default: the model's, or 0."
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Parameter(
            help="Subtracted from the logit of each token that occurs in the answer, -2 to 2."
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Parameter(help="Subtracted once for each occurrence of the token in the answer, -2 to 2."),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        Parameter(
            help="Divides the positive logits of recent tokens and multiplies the negative ones; 1 "
            "is off; default: the model's, or 1."
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        Parameter(
            help="The number of latest tokens of prompt and answer that count as recent; -1 is all."
        ),
    ] = None
    min_tokens: Annotated[
        int, Parameter(help="The model cannot end the answer before this many tokens.")
    ] = 0
    seed: Annotated[
        int | None,
        Parameter(
            help="The seed of the draws. The same seed gives the same draws, and the same answer where "
            "nothing else runs (docs/REPRODUCIBILITY.md)."
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(help="End the answer before this text; may be given up to 8 times.", negative=""),
    ] = ()
    schema: Annotated[
        Path | None, Parameter(help="A file with a JSON Schema; the answer is an instance of it.")
    ] = None
    grammar: Annotated[
        Path | None, Parameter(help="A file with a grammar (GBNF or Lark); the answer matches it.")
    ] = None
    model: Annotated[
        str | None,
        Parameter(help="Which of the daemon's models answers; default: the first."),
    ] = None
    priority: Annotated[
        Lane,
        Parameter(help="The lane: interactive if a person waits for the answer, else background."),
    ] = "interactive"
    session: Annotated[
        str | None,
        Parameter(
            help="A name for a conversation: its prefix stays in the cache for a while. It keeps no "
            "messages; `uma-trio chat` does."
        ),
    ] = None
    cache: Annotated[
        str | None,
        Parameter(
            help="Who shares cached prefixes with this request: private, this process only; any other "
            "text, requests with the same text; default: every process of this user."
        ),
    ] = None
    speculation: Annotated[
        Speculation | None,
        Parameter(
            help="Speculative decoding, up to the daemon's own setting; default: auto, or off with --seed."
        ),
    ] = None
    pace: Annotated[
        Pace,
        Parameter(
            help="smooth: tokens may be delayed to arrive at even intervals while other requests use the "
            "machine; asap: each is sent when it is computed."
        ),
    ] = "smooth"
    awaits: Annotated[
        Awaits | None,
        Parameter(
            help="What somebody waits for: tokens, as they come; the end of the answer; nothing (in the "
            "background lane). Default: by the other options."
        ),
    ] = None
    app: Annotated[str | None, Parameter(help="The name of the program in `uma-trio ps`.")] = None
    socket: SocketFlag = None
    wait: WaitFlag = True
    start: StartFlag = None

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """What a request says beyond its prompt; files are read once.

        Raises :class:`ConfigError` about a file that cannot be read, or is not what it should be.
        """
        from uma_protocol import Generate

        named = [name for name in fields_dict(AnswerFlags) if name in Generate.__struct_fields__]
        said = {name: getattr(self, name) for name in named}
        said["schema"] = None if self.schema is None else json_of(self.schema)
        said["grammar"] = None if self.grammar is None else text_of(self.grammar)
        return said | self._more

    @property
    def _more(self) -> dict[str, Any]:
        """What only some verbs ask for."""
        return {}

    def check(self, **said: Any) -> None:
        """Raise :class:`ConfigError` about a flag that no daemon would take, before one is looked for."""
        from uma_protocol import Generate, LocalProtocolError, encode_request

        try:
            encode_request(Generate(id="-", **said, **self.parameters))
        except LocalProtocolError as error:
            from uma_trio.cli.spoken import sentence

            raise ConfigError(f"{sentence(error)} See --help.") from error
