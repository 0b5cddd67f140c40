"""A link that takes time, between two TUN devices, in a process of its own.

    python -m disagg.testing.links.forwarder FD FD RATE_MBIT ROUND_TRIP_S MTU

Kernels without the netem queue cannot delay packets, so this does: each packet read from one device is written to the
other when `OneWay` says that it has arrived. It ends with its parent, and the devices with it.
"""

import contextlib
import ctypes
import errno
import os
import select
import sys
import time

from disagg.channel.lifeline import watch_parent
from disagg.testing.links.shape import LinkShape, OneWay

PR_SET_TIMERSLACK = 29
MAX_PACKET_BYTES = 65536
NICENESS = -15  # a link does not wait for its turn on a busy machine
MAX_BURST = 64  # packets read from one end before the other is looked at


def forward(ends: tuple[int, int], shape: LinkShape) -> None:
    """For ever, or until a device is gone (OSError)."""
    ways = [(ends[0], ends[1], OneWay(shape)), (ends[1], ends[0], OneWay(shape))]
    while True:
        now_s = time.monotonic()
        for _, target, way in ways:
            for packet in way.arrived(now_s):
                _put(target, packet)
        next_s = min(way.next_s() for _, _, way in ways)
        wait_s = None if next_s == float("inf") else max(0.0, next_s - time.monotonic())
        readable, _, _ = select.select(ends, [], [], wait_s)
        for source, _, way in ways:
            if source in readable:
                _take(source, way)


def _put(target: int, packet: bytes) -> None:
    """A device that is full or down loses it."""
    try:
        os.write(target, packet)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EIO):
            raise


def _take(source: int, way: OneWay) -> None:
    now_s = time.monotonic()
    with contextlib.suppress(BlockingIOError):
        for _ in range(MAX_BURST):
            way.offer(os.read(source, MAX_PACKET_BYTES), now_s)


def main() -> None:
    lifeline = watch_parent()
    with contextlib.suppress(PermissionError):
        os.nice(NICENESS)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else each wait ends some 50 us late
    first, second, rate_mbit, round_trip_s, mtu = sys.argv[1:]
    shape = LinkShape(float(rate_mbit), float(round_trip_s), int(mtu))
    print("up", flush=True)
    try:
        forward((int(first), int(second)), shape)
    finally:
        if lifeline is not None:
            lifeline.close()


if __name__ == "__main__":
    main()
