"""A byte is taken only from who was paired, on a connection made for it, under a grant that stands and is proven."""

import socket
import threading

import pytest
import xxhash
from tests.unit.transport.rigs import (
    DEADLINE_S,
    DECODE,
    PREFILL,
    RAW,
    RAW_INCARNATION,
    RECEIVER_INCARNATION,
    SENDER_INCARNATION,
    EventLog,
    TcpRig,
    dialled,
    greet,
    raw_header,
    raw_hello,
    read_ack,
    read_challenge,
    read_welcome,
    write_of,
)

from disagg.channel.keys import Keys
from disagg.channel.tally import Refusal
from disagg.core.errors import PeerLost
from disagg.core.ids import Incarnation
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.api import ConnectionLost, WriteFinished, WriteLanded
from disagg.transport.capability import SECRET_BYTES, frame_proof, grant_name, hello_proof, pairing_token
from disagg.transport.segments import SegmentArray
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender
from disagg.transport.wire import FrameHeader, Item, checksum_of, encode, encode_trailer

KEY = b"the destination's secret words"
RUN = (Segment(0, 1000),)
PACKED = SegmentArray.of(RUN).pack()


def frame(header: FrameHeader, payload: bytes) -> bytes:
    head = encode(Item.FRAME, header)
    return head + payload + encode_trailer(xxhash.xxh3_64_intdigest(payload, seed=checksum_of(head)))


def push(sock: socket.socket, header: FrameHeader) -> str | None:
    sock.sendall(frame(header, bytes(header.num_bytes)))
    return read_ack(sock).failure


def test_a_frame_without_the_grants_key_lands_nothing_and_is_counted(tcp: TcpRig) -> None:
    tcp.receiver.grant(RAW, KEY, RUN)
    with dialled(tcp.receiver) as sock:
        nonce = greet(sock, tcp.receiver)
        good = raw_header(KEY, nonce, 0, RUN, 1000)
        forged = FrameHeader(grant_name(KEY), 0, b"", PACKED, 1000, frame_proof(b"a guess", nonce, 0))
        assert "not granted" in (push(sock, forged) or "")
        assert "not granted" in (push(sock, raw_header(b"unknown", nonce, 0, RUN, 1000)) or "")
        assert tcp.landed.of(WriteLanded) == []
        assert tcp.target.num_commits == 0
        assert push(sock, good) is None
    assert tcp.receiver.refused.counts() == {Refusal.FALSE_PROOF: 1, Refusal.NO_GRANT: 1}


def test_a_frame_recorded_on_one_connection_is_worth_nothing_on_another(tcp: TcpRig) -> None:
    tcp.receiver.grant(RAW, KEY, RUN)
    with dialled(tcp.receiver) as old:
        recorded = raw_header(KEY, greet(old, tcp.receiver), 0, RUN, 1000)
    with dialled(tcp.receiver) as new:
        greet(new, tcp.receiver)
        assert "not granted" in (push(new, recorded) or "")
    assert tcp.landed.of(WriteLanded) == []


def test_a_proof_is_for_one_write_only(tcp: TcpRig) -> None:
    tcp.receiver.grant(RAW, KEY, RUN)
    with dialled(tcp.receiver) as sock:
        nonce = greet(sock, tcp.receiver)
        moved = FrameHeader(grant_name(KEY), 1, b"", PACKED, 1000, frame_proof(KEY, nonce, 0))
        assert "not granted" in (push(sock, moved) or "")


def test_a_grant_given_back_or_of_another_peer_is_refused(tcp: TcpRig) -> None:
    tcp.receiver.grant(RAW, KEY, RUN)
    tcp.receiver.grant(PREFILL, b"another's", RUN)
    tcp.receiver.revoke(KEY)
    with dialled(tcp.receiver) as sock:
        nonce = greet(sock, tcp.receiver)
        for key in (KEY, b"another's"):
            assert "not granted" in (push(sock, raw_header(key, nonce, 0, RUN, 1000)) or "")
    assert tcp.landed.of(WriteLanded) == []
    assert tcp.receiver.refused.counts() == {Refusal.NO_GRANT: 2}


def test_no_key_is_ever_seen_on_the_wire_or_in_an_answer(tcp: TcpRig) -> None:
    tcp.receiver.grant(RAW, KEY, RUN)
    with dialled(tcp.receiver) as sock:
        header = raw_header(KEY, greet(sock, tcp.receiver), 0, (Segment(5000, 1000),), 1000)
        assert KEY not in encode(Item.FRAME, header)
        failure = push(sock, header) or ""
        assert "outside" in failure
        assert KEY.hex() not in failure


@pytest.mark.parametrize("flaw", ["token", "incarnation", "lane", "replayed"])
def test_a_hello_that_does_not_prove_its_pairing_is_refused(tcp: TcpRig, flaw: str) -> None:
    with dialled(tcp.receiver) as sock:
        nonce = read_challenge(sock)
        token = tcp.receiver.endpoint_for(RAW, RAW_INCARNATION).token
        hello = raw_hello(tcp.receiver, nonce)
        match flaw:
            case "token":
                proof = hello_proof(bytes(SECRET_BYTES), nonce, 0)
            case "incarnation":
                proof = hello_proof(tcp.receiver.endpoint_for(RAW, Incarnation(6)).token, nonce, 0)
            case "lane":
                proof = hello_proof(token, nonce, 1)
            case _:
                proof = hello_proof(token, bytes(16), 0)
        sock.sendall(encode(Item.HELLO, type(hello)(RAW, RAW_INCARNATION, RECEIVER_INCARNATION, True, 0, proof)))
        assert "proof" in (read_welcome(sock).refusal or "")
    tcp.receiver.close()
    assert tcp.receiver.refused.counts() == {Refusal.NOT_PAIRED: 1}


def test_tokens_differ_by_secret_peer_and_incarnation() -> None:
    tokens = {
        pairing_token(secret, peer, Incarnation(number))
        for secret in (b"one", b"two")
        for peer in (RAW, PREFILL)
        for number in (1, 2)
    }
    assert len(tokens) == 8


def test_strangers_beyond_the_cap_push_out_the_oldest_and_a_paired_sender_gets_in() -> None:
    log, sent = EventLog(), EventLog()
    receiver = TcpReceiver(BytesMemory(1000), RECEIVER_INCARNATION, log.post, max_strangers=4)
    host, _, port = receiver.endpoint.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(10)]
    for sock in silent:
        try:
            read_challenge(sock)
        except (AssertionError, ConnectionError):
            continue
    sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(1000), sent.post)
    sender.connect(DECODE, receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, RUN)
    sender.write(write_of(KEY, 0, RUN, RUN))
    assert sent.wait(WriteFinished)[0].failure is None
    receiver.check_invariants()
    assert receiver.refused.counts()[Refusal.FULL] >= 6
    for sock in silent:
        sock.close()
    sender.close()
    receiver.close()


def test_a_sender_without_a_certificate_is_refused_and_counted(keys: Keys) -> None:
    receiver = TcpReceiver(BytesMemory(1000), RECEIVER_INCARNATION, EventLog().post, tls=keys.accepting)
    sent = EventLog()
    sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(1000), sent.post, TcpSenderConfig(stall_timeout_s=2.0))
    sender.connect(DECODE, receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, RUN)
    sender.write(write_of(KEY, 0, RUN, RUN))
    assert sent.wait(WriteFinished)[0].failure is not None
    sent.wait(ConnectionLost)
    sender.close()
    receiver.close()
    assert sum(receiver.refused.counts().values()) == 1


def test_a_link_is_measured_on_a_connection_of_its_own(tcp: TcpRig) -> None:
    assert isinstance(tcp.sender, TcpSender)
    endpoint = tcp.receiver.endpoint_for(PREFILL, SENDER_INCARNATION)
    measured = tcp.sender.measure(endpoint, RECEIVER_INCARNATION, 0.02)
    assert measured.bytes_per_s > 1e6
    assert 0 < measured.latency_s < 1
    assert tcp.target.num_commits == 0
    assert tcp.landed.events == []
    with pytest.raises(PeerLost, match="incarnation"):
        tcp.sender.measure(endpoint, Incarnation(404), 0.02)
    tcp.sender.close()
    with pytest.raises(PeerLost, match="closed"):
        tcp.sender.measure(endpoint, RECEIVER_INCARNATION, 0.02)


def test_an_idle_connection_is_made_anew_before_it_is_trusted(tcp: TcpRig) -> None:
    sent = EventLog()
    sender = TcpSender(PREFILL, SENDER_INCARNATION, tcp.source, sent.post, TcpSenderConfig(max_idle_s=0.05))
    sender.connect(DECODE, tcp.receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    tcp.receiver.grant(PREFILL, KEY, RUN)
    (link,) = sender._links[DECODE]
    seen = []
    for number in range(3):
        sender.write(write_of(KEY, number, RUN, RUN))
        assert sent.wait(WriteFinished, number + 1)[-1].failure is None
        seen.append(link._connection)
        assert not is_lost_within(sent, 0.15)
    assert len({id(each) for each in seen}) == 3
    assert sent.of(ConnectionLost) == []
    sender.close()


def is_lost_within(log: EventLog, seconds: float) -> bool:
    """Lets a while pass; whether the connection was lost meanwhile."""
    lost = threading.Event()
    log.on_event = lambda event: lost.set() if isinstance(event, ConnectionLost) else None
    return lost.wait(seconds)
