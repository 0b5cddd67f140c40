"""The file of a router's decision log. What cannot be written is given up: a full disk ends the log, not the router."""

import contextlib
import logging
from pathlib import Path
from typing import BinaryIO

from disagg.core.errors import ConfigurationError

_log = logging.getLogger(__name__)


class DecisionFile:
    """Open until close(), or until a write fails."""

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError when the file cannot be made."""
        self._path = path
        try:
            self._file: BinaryIO | None = Path(path).open("wb")  # noqa: SIM115
        except OSError as error:
            text = f"cannot write a decision log to {path}: {error.strerror or error}; choose another --decision-log"
            raise ConfigurationError(text) from None

    def write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            _log.warning("the decision log %s ends here: %s", self._path, error)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # its last lines may be lost
                file.close()
