"""Class J: programs of two versions meet; what fits works together, what does not is refused with both versions named.

=== ===============================================================================================================
J1  Protocol N meets N + 1 without a version in common: refused at once, by router and peer, naming both ranges.
    Nobody waits for KV that will not come; the data connection has a version of its own, checked in its first item.
J2  Half a fleet is upgraded: the router pairs only those that fit, and no request fails.
=== ===============================================================================================================
"""

import asyncio
import struct
from contextlib import AsyncExitStack

import msgspec
import pytest
from tests.faults import loopback
from tests.faults.loopback import live_router, live_worker, paired
from tests.unit.worker.rigs import DEADLINE_S, Site, layout, until

from disagg.core.errors import ConfigurationError, FailureKind, ProtocolViolation
from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.transport.wire import VERSION, Item, decode_prefix
from disagg.worker.links import RouterLink

pytestmark = pytest.mark.usefixtures("no_socket_left")


async def test_j1_a_worker_of_another_version_is_refused_by_the_router_for_good_with_both_ranges() -> None:
    async with live_router(protocol=(1, 1)) as (served, address):
        site = Site("new", Role.MIXED, layout(), 8)
        await site.open()
        site.peers.card = msgspec.structs.replace(site.peers.card, protocol_min=2, protocol_max=2)
        link = RouterLink(site.worker, site.peers, address, 1.0)
        try:
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(ConfigurationError) as refusal:
                    await link.run()
        finally:
            await link.close()
            await site.close()
        assert "2..2" in str(refusal.value)
        assert "1..1" in str(refusal.value)
        assert served.dispatcher.registry.records() == []


async def test_j1_two_workers_without_a_version_in_common_are_refused_at_pairing_with_both_ranges() -> None:
    """The router speaks both, so both register; they are never paired, and a request is told why."""
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(protocol=(1, 2)))
        old = await stack.enter_async_context(live_worker("p", Role.PREFILL, address, protocol=(1, 1)))
        new = await stack.enter_async_context(live_worker("d", Role.DECODE, address, protocol=(2, 2)))
        registry = served.dispatcher.registry
        await until(lambda: any(record.refusals for record in registry.records()))
        found = registry.get(WorkerId("p"))
        assert found is not None
        (failure,) = found.refusals.values()
        assert failure.kind is FailureKind.INVALID_REQUEST
        for text in ("1..1", "2..2", "protocol range"):
            assert text in failure.message
        assert loopback.num_pairs(served) == 0
        for site in (old, new):
            assert site.worker.scheduler.is_idle


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, 65535])
def test_j1_a_data_connection_of_another_version_is_told_both_and_nothing_is_read_of_it(version: int) -> None:
    prefix = struct.pack("!4sHHII", b"DgKV", version, Item.HELLO, 10, 0)
    with pytest.raises(ProtocolViolation, match=rf"version {version}, this side speaks {VERSION}"):
        decode_prefix(prefix, Item.HELLO)


async def test_j2_half_a_fleet_upgraded_pairs_only_those_that_fit_and_no_request_fails() -> None:
    """Two old ones, two new ones and a router that speaks both: requests go on while the new ones come."""
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(protocol=(1, 2)))
        sites = {}
        for name, role in (("p-old", Role.PREFILL), ("d-old", Role.DECODE)):
            worker = live_worker(name, role, address, protocol=(1, 1))
            sites[name] = await stack.enter_async_context(worker)
        await paired(served)
        asked = [asyncio.ensure_future(loopback.read_whole(*loopback.ask(served, number))) for number in range(20)]
        for name, role in (("p-new", Role.PREFILL), ("d-new", Role.DECODE)):
            worker = live_worker(name, role, address, protocol=(2, 2))
            sites[name] = await stack.enter_async_context(worker)
        await paired(served, 2)
        asked += [asyncio.ensure_future(loopback.read_whole(*loopback.ask(served, number))) for number in range(20, 60)]
        async with asyncio.timeout(3 * DEADLINE_S):
            await asyncio.gather(*asked)
        pairs = {
            (record.card.worker_id, partner)
            for record in served.dispatcher.registry.records()
            for partner in record.partners
        }
        assert pairs == {("p-old", "d-old"), ("p-new", "d-new")}
        await loopback.settled(*sites.values())
