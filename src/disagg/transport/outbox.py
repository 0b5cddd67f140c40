"""Posts events in the order in which the state changed.

Events are put while the owner's lock is held and posted after it is released, so that a callback may call straight
back into the transport. One thread posts at a time; whoever finds it busy leaves its events to that thread.
"""

import threading
from collections import deque

from disagg.transport.api import Post, TransportEvent


class Outbox:
    """An ordered way from under a lock to a callback."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._events: deque[TransportEvent] = deque()
        self._turn = threading.Lock()

    def put(self, event: TransportEvent) -> None:
        """Queue an event; call under the lock that guards the state it tells of."""
        self._events.append(event)

    def flush(self) -> None:
        """Post what is queued; call without that lock."""
        while self._events:
            if not self._turn.acquire(blocking=False):
                return  # the thread that posts now looks again after releasing its turn
            try:
                while self._events:
                    self._post(self._events.popleft())
            finally:
                self._turn.release()
