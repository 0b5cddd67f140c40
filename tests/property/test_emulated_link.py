"""What an emulated link does to packets: never faster than its rate and its way, in order, and none invented."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.testing.links.shape import LinkShape, OneWay

PACKETS = st.lists(st.tuples(st.integers(1, 65535), st.floats(0.0, 0.05)), min_size=1, max_size=80)


@given(packets=PACKETS, rate_mbit=st.floats(1.0, 10_000.0), round_trip_s=st.floats(0.0, 0.2))
def test_packets_come_in_order_late_enough_and_at_most_at_the_rate(
    packets: list[tuple[int, float]], rate_mbit: float, round_trip_s: float
) -> None:
    shape = LinkShape(rate_mbit, round_trip_s)
    way, now_s = OneWay(shape), 0.0
    offered: dict[bytes, float] = {}
    arrived: list[tuple[float, bytes]] = []
    for number, (num_bytes, gap_s) in enumerate(packets):
        now_s += gap_s
        packet = number.to_bytes(4, "big") + bytes(num_bytes)
        offered[packet] = now_s
        way.offer(packet, now_s)
        way.check_invariants()
        arrived += [(now_s, each) for each in way.arrived(now_s)]
    while (next_s := way.next_s()) < float("inf"):
        assert not way.arrived(next_s - 1e-6 - 1e-9 * next_s)
        arrived += [(next_s, each) for each in way.arrived(next_s)]
        way.check_invariants()
    assert len(arrived) + way.num_dropped == len(offered)
    assert [packet for _, packet in arrived] == sorted(packet for _, packet in arrived)
    carried = 0
    for at_s, packet in arrived:
        carried += len(packet)
        least_s = len(packet) / shape.bytes_per_s + round_trip_s / 2
        assert at_s >= offered[packet] + least_s - 1e-9
        assert carried <= shape.bytes_per_s * (at_s - round_trip_s / 2) * (1 + 1e-9) + 1e-3


def test_a_full_buffer_drops() -> None:
    way = OneWay(LinkShape(1.0))
    for _ in range(1000):
        way.offer(bytes(1500), 0.0)
    way.check_invariants()
    assert way.num_dropped > 0
    assert len(way.arrived(1e6)) == 1000 - way.num_dropped
