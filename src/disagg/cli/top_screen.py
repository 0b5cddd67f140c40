"""A terminal's whole screen, drawn line by line: every picture is written whole, in one go.

So what another program has written into it is gone with the next picture. The usual library lays each picture out in
segments of a whole screen, which costs more than all else that a look does.
"""

import shutil
from collections.abc import Sequence
from types import TracebackType
from typing import Final, TextIO

from rich.cells import cell_len, set_cell_size

from disagg.cli.top_view import Line, fitted

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, without a cursor, empty
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_REST_OF_LINE: Final = "\x1b[K"
_REST_OF_SCREEN: Final = "\r\n\x1b[J"
_ELLIPSIS: Final = "\N{HORIZONTAL ELLIPSIS}"
_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


class Screen:
    """Taken on entering, given back on leaving, whatever happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> "Screen":
        self._write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(_LEAVE)

    @property
    def width(self) -> int:
        """In cells."""
        return shutil.get_terminal_size().columns

    def show(self, lines: Sequence[Line]) -> None:
        """From the first line on; those that do not fit are counted by the last one."""
        width, height = shutil.get_terminal_size()
        shown = fitted(lines, height)
        rest = _REST_OF_SCREEN if len(shown) < height else ""
        self._write(_HOME + "\r\n".join([drawn(line, width) for line in shown]) + rest)

    def _write(self, text: str) -> None:
        self._out.buffer.write(text.encode(self._out.encoding, "replace"))
        self._out.buffer.flush()


def drawn(line: Line, width: int) -> str:
    """One line of the terminal: no wider than it, and nothing in it that would steer it."""
    text = line.text
    if not text.isprintable():
        text = "".join([each if each.isprintable() else _UNPRINTABLE for each in text])
    room = width - cell_len(text)
    if room < 0:
        text = set_cell_size(text, width - 1) + _ELLIPSIS
    styled = f"\x1b[1m{text}\x1b[0m" if line.is_title and text else text
    # Behind a full line the cursor still stands on its last cell.
    return styled + _REST_OF_LINE if room > 0 else styled
