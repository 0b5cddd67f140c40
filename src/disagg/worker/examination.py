"""What a worker finds out about its machine and its links, for people to read."""

import fcntl
import os
import resource
import shutil
import socket
import struct
import time
from pathlib import Path

import numpy as np

from disagg.core.endpoints import is_loopback
from disagg.protocol.messages import HostLimits

LOOPBACK_GBITS = 4.0  # two processes of one machine, through its kernel
LEAST_SHARE = 0.1  # of what a link should give; less is worth a warning
BYTES_PER_GBIT = 125e6
COPY_BYTES = 2 << 20
NUM_COPIES = 4

_SHARED_MEMORY = "/dev/shm"
_CARDS = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network card


def host_limits() -> HostLimits:
    """Of this process."""
    return HostLimits(
        max_open_files=_limit(resource.RLIMIT_NOFILE),
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0,
        num_cores=len(os.sched_getaffinity(0)),
    )


def expected_bytes_per_s(host: str, link_gbits: float) -> float:
    """What a link from this address should carry: as told, or as its network card says. 0 where nobody knows."""
    if link_gbits > 0:
        return link_gbits * BYTES_PER_GBIT
    if is_loopback(host):
        return LOOPBACK_GBITS * BYTES_PER_GBIT
    for _, card in socket.if_nameindex():
        if _address_of(card) == host:
            return _card_gbits(card) * BYTES_PER_GBIT
    return 0.0


def copied_bytes_per_s() -> float:
    """How fast this process copies memory, now: on a busy machine slower, as is everything that it is compared with."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    np.copyto(target, source)  # every page is there from now on
    started_s = time.perf_counter()
    for _ in range(NUM_COPIES):
        np.copyto(target, source)
    return NUM_COPIES * COPY_BYTES / (time.perf_counter() - started_s)


def slowness(bytes_per_s: float, expected: float) -> str:
    """What is wrong with a measured rate; "" when nothing is."""
    if not 0.0 < bytes_per_s < LEAST_SHARE * expected:
        return ""
    share, gbits = bytes_per_s / expected, bytes_per_s / BYTES_PER_GBIT
    return f"{gbits:.2g} Gbit/s, {share:.0%} of the {expected / BYTES_PER_GBIT:.3g} Gbit/s that the link should give"


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _address_of(card: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", card.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def _card_gbits(card: str) -> float:
    try:
        return max(int((_CARDS / card / "speed").read_text()), 0) / 1000
    except (OSError, ValueError):  # virtual cards do not say
        return 0.0
