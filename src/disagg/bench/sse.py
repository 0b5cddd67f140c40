"""Server-sent events out of bytes that come in any pieces. Pure."""

MAX_EVENT_BYTES = 1 << 24


class EventParser:
    """feed() bytes, get the data of each event they complete. Comments and fields other than data are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of whole events, several data lines joined by a line break. Raises ValueError for an endless line."""
        found: list[bytes] = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def check_invariants(self) -> None:
        assert b"\n" not in self._rest
