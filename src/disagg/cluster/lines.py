"""Bytes of a child's output cut into lines."""

MAX_LINE_BYTES = 8192


class LineSplitter:
    """Feed bytes, get whole lines. A line longer than max_line_bytes is cut into several: memory stays bounded."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Lines that end within `data`, without their newline; empty lines are dropped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > self._max_line_bytes:
            lines.append(self._rest[: self._max_line_bytes])
            self._rest = self._rest[self._max_line_bytes :]
        texts = (line.decode("utf-8", "replace").rstrip() for line in lines)
        return [text for text in texts if text]

    def flush(self) -> list[str]:
        """What is left when the output ends."""
        return self.feed(b"\n") if self._rest else []

    def check_invariants(self) -> None:
        assert len(self._rest) <= self._max_line_bytes
        assert b"\n" not in self._rest
