"""The compiled way to move and sum scattered runs: one call for many of them, in which other threads run.

native = native_runs()      None where nothing is compiled or the CPU is too old: callers then use numpy and xxhash
"""

import ctypes
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache

from disagg.engine.native.build import compiled
from disagg.transport.pieces import Bytes, Ints

MIN_BYTES = 241  # shorter inputs have another form of XXH3
PEER_CLOSED = 1  # what receive() returns besides errors

_RUNS = [c_void_p, c_void_p, c_int64]  # starts, lengths, how many
_SIGNATURES = {
    "disagg_sum_bytes": ([], c_int64),
    "disagg_sum_begin": ([c_void_p, c_uint64], None),
    "disagg_sum_end": ([c_void_p], c_uint64),
    "disagg_copy_sum": ([*[c_void_p] * 4, *_RUNS], None),
    "disagg_send_runs": ([c_int, *[c_void_p] * 2, *_RUNS, c_int], c_int),
    "disagg_receive_runs": ([c_int, *[c_void_p] * 2, *_RUNS], c_int),
}


class NativeSum:
    """The XXH3 of at least MIN_BYTES bytes, taken in by runs. Who calls has checked that runs lie in their arena."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int, seed: int) -> None:
        self._library = library
        self.state = ctypes.create_string_buffer(num_bytes)
        library.disagg_sum_begin(self.state, seed)

    def copy(self, source: Bytes, starts: Ints, target: Bytes, places: Ints, lengths: Ints) -> None:
        """Copy runs and take them in."""
        self._library.disagg_copy_sum(
            self.state,
            source.ctypes.data,
            target.ctypes.data,
            places.ctypes.data,
            starts.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
        )

    def add(self, source: Bytes, starts: Ints, lengths: Ints) -> None:
        """Take runs in where they lie."""
        at, sizes = starts.ctypes.data, lengths.ctypes.data
        self._library.disagg_copy_sum(self.state, source.ctypes.data, None, None, at, sizes, len(lengths))

    def end(self) -> int:
        """Of what was taken in so far."""
        return int(self._library.disagg_sum_end(self.state))


class NativeRuns:
    """Sockets are blocking ones, with the kernel's time-outs; at most IOV_MAX runs in a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._sum_bytes = int(library.disagg_sum_bytes())

    def begin(self, seed: int = 0) -> NativeSum:
        """A sum of nothing yet."""
        return NativeSum(self._library, self._sum_bytes, seed)

    def send(self, sock: int, digest: NativeSum | None, arena: Bytes, starts: Ints, lengths: Ints, flags: int) -> int:
        """Take runs in (unless digest is None) and send them. Returns 0 or a negative errno."""
        state = None if digest is None else digest.state
        at, sizes = starts.ctypes.data, lengths.ctypes.data
        return int(self._library.disagg_send_runs(sock, state, arena.ctypes.data, at, sizes, len(lengths), flags))

    def receive(self, sock: int, digest: NativeSum | None, arena: Bytes, starts: Ints, lengths: Ints) -> int:
        """Fill runs and take them in. Returns 0, a negative errno or PEER_CLOSED."""
        state = None if digest is None else digest.state
        at, sizes = starts.ctypes.data, lengths.ctypes.data
        return int(self._library.disagg_receive_runs(sock, state, arena.ctypes.data, at, sizes, len(lengths)))


@cache
def native_runs() -> NativeRuns | None:
    """Looked for once per process; nothing is compiled here."""
    path = compiled()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.disagg_has_runs.argtypes, library.disagg_has_runs.restype = [], c_int
    return NativeRuns(library) if library.disagg_has_runs() else None
