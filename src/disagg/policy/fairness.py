"""How much each tenant has had of a worker, so that the next turn can be of the one that has had least.

Virtual token counters after Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: a tenant is charged
for every prompt token computed for it, for the room of each hand-off that is let in, and for every block by which its
answers grow; the least charged one is served next; a tenant that comes back from idleness starts level with the least
charged of those that are waiting, so that nobody saves up service. Charges decay, so that old ones are not held against
anybody.
"""

import math
from collections import OrderedDict

from disagg.core.errors import InternalFault

HALF_LIFE_S = 30.0
MAX_IDLE = 256  # tenants without work that are remembered; the one idle for longest is forgotten first
MAX_EXPONENT = 64.0  # half-lives until charges are put on a new scale


class TenantService:
    """Tokens per tenant, decayed. Charges are kept as of `_epoch_s`, so that time passing changes nothing."""

    def __init__(self) -> None:
        self._epoch_s = 0.0
        self._charges: dict[str, float] = {}  # of tenants with work here
        self._num_open: dict[str, int] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._charges) + len(self._idle)

    def arrive(self, tenant: str, now_s: float) -> None:
        """One more sequence of this tenant waits for its turn."""
        if tenant in self._num_open:
            self._num_open[tenant] += 1
            return
        self._set_epoch(now_s)
        least = min(self._charges.values(), default=0.0)
        self._charges[tenant] = max(self._idle.pop(tenant, 0.0), least)
        self._num_open[tenant] = 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant has had its turn, or will not."""
        self._num_open[tenant] -= 1
        if self._num_open[tenant] == 0:
            del self._num_open[tenant]
            self._idle[tenant] = self._charges.pop(tenant)
            if len(self._idle) > MAX_IDLE:
                self._idle.popitem(last=False)

    def charge(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """It has had so many. One that has long had nothing, and is forgotten, is not charged."""
        table = self._charges if tenant in self._charges else self._idle
        if tenant in table:
            self._set_epoch(now_s)
            table[tenant] += num_tokens * self._growth(now_s)

    def had(self, tenant: str) -> float:
        """Of a tenant with work here, to compare it with others: on a scale of its own, whatever the time."""
        return self._charges.get(tenant, 0.0)

    def services(self, now_s: float) -> dict[str, float]:
        """Decayed tokens of each tenant with work here."""
        growth = self._growth(now_s)
        return {tenant: charge / growth for tenant, charge in self._charges.items()}

    def check_invariants(self) -> None:
        if self._charges.keys() != self._num_open.keys() or self._charges.keys() & self._idle.keys():
            raise InternalFault("a tenant is idle and has work, or is charged without having any")
        if len(self._idle) > MAX_IDLE or min(self._num_open.values(), default=1) < 1:
            raise InternalFault(f"{len(self._idle)} idle tenants of {MAX_IDLE}, open prompts {self._num_open}")

    def _growth(self, now_s: float) -> float:
        return math.exp2(min((now_s - self._epoch_s) / HALF_LIFE_S, 2 * MAX_EXPONENT))

    def _set_epoch(self, now_s: float) -> None:
        """A new scale before charges grow beyond what a float can add to."""
        if now_s - self._epoch_s <= MAX_EXPONENT * HALF_LIFE_S:
            return
        factor = math.exp2(-min((now_s - self._epoch_s) / HALF_LIFE_S, 1000.0))
        self._epoch_s = now_s
        for table in (self._charges, self._idle):
            for tenant in table:
                table[tenant] *= factor
