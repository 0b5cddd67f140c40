"""Class K: what one tenant's prompts have left in the caches is found by nobody else's.

The router makes the salt of the key that a caller has shown and takes none from a body: tests/unit/router.
"""

from tests.faults.outputs import GREEDY, check_answers, counted

from disagg.core.roles import Role
from disagg.dispatch.stream import GenerateRequest
from disagg.telemetry import metrics as table
from disagg.testing.virtual import MODEL, VirtualCluster

PROMPT = tuple(range(40))


def test_k3_kv_of_one_tenant_is_not_read_with_the_key_of_another() -> None:
    """Neither where it was computed nor where it was handed to, and not by who has shown no key at all."""
    cluster = VirtualCluster(7)
    workers = [cluster.start_worker("prefill-0", Role.PREFILL), cluster.start_worker("decode-0", Role.DECODE)]
    cluster.time.run(until=lambda: cluster.is_ready)
    known: set[str] = set()
    for salt in ("a", "b", "a", "", "b", ""):
        before = [counted(each, table.PREFIX_TOKENS_HIT) for each in workers]
        cluster.submit(GenerateRequest(MODEL, PROMPT, GREEDY, cache_salt=salt))
        cluster.time.run(until=lambda: cluster.are_all_over)
        found = [counted(each, table.PREFIX_TOKENS_HIT) > count for each, count in zip(workers, before, strict=True)]
        assert any(found) is (salt in known), salt
        known.add(salt)
    check_answers(cluster)
    assert counted(workers[1], table.HANDOFFS, "received") >= len(known)
    cluster.check_nothing_left()
