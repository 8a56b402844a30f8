"""Text that comes in pieces, shown on a terminal with words kept whole."""

from __future__ import annotations

from collections.abc import Callable

_FENCE = "```"


class Wrapped:
    """Writes pieces at once; a word that does not fit is taken back and written on the next line.

    Lines between fences of code are left as they are. `width` is asked again for each piece, because a window
    changes its size; `cells` is how many columns a text takes.
    """

    def __init__(
        self, write: Callable[[str], object], width: Callable[[], int], cells: Callable[[str], int]
    ) -> None:
        self._write = write
        self._width = width
        self._cells = cells
        self._line = ""  # the line of the text, as far as it has come
        self._column = 0
        self._word = ""
        self._in_code = False

    def put(self, text: str) -> None:
        """Show the next piece."""
        width = max(20, self._width())
        for character in text:
            if character == "\n":
                self._end_line()
            elif character.isspace():
                self._space(character, width)
            else:
                self._letter(character, width)

    def end(self) -> None:
        """End the line if it has begun."""
        if self._column or self._line:
            self._end_line()
        self._in_code = False

    def _end_line(self) -> None:
        if self._line.lstrip().startswith(_FENCE):
            self._in_code = not self._in_code
        self._write("\n")
        self._line = self._word = ""
        self._column = 0

    def _space(self, character: str, width: int) -> None:
        self._line += character
        self._word = ""
        if self._in_code or self._column + 1 < width:
            self._write(character)
            self._column += 1
        elif self._column:  # the margin stands for the space
            self._write("\n")
            self._column = 0

    def _letter(self, character: str, width: int) -> None:
        self._line += character
        size = self._cells(character)
        if not self._in_code and self._column + size > width - 1:
            begun = self._word if self._cells(self._word) < width - 2 else ""
            back = self._cells(begun)
            if back and back < self._column:
                self._write(f"\x1b[{back}D\x1b[K\n{begun}")
            else:
                self._write("\n")
                begun = ""
            self._word, self._column = begun, self._cells(begun)
        self._write(character)
        self._word += character
        self._column += size
