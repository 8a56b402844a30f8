"""What encoders have computed. Written by the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define


@define
class EncodingFigures:
    """Since the start, all encoders together."""

    inputs: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def encoded(self, inputs: int, tokens: int) -> None:
        """Count the inputs of a batch, and their tokens."""
        self.inputs += inputs
        self.tokens += tokens

    def spent(self, seconds: float) -> None:
        """Count the time that was spent."""
        self.seconds += seconds

    def values(self) -> Mapping[str, object]:
        """Return them by the names of the catalogue."""
        return {
            "encoded_inputs_total": self.inputs,
            "encoded_tokens_total": self.tokens,
            "encode_s_total": self.seconds,
        }
