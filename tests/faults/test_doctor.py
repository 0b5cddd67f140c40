"""`disagg doctor`: what it finds is what is wrong, and only that."""

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.faults.loopback import live_router, live_worker, paired
from tests.unit.worker.rigs import until

from disagg.cli import doctor
from disagg.cluster import examination
from disagg.cluster.authority import make_keys
from disagg.cluster.examination import ClusterReport, Patient, examine_cluster, judge
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import ConfigurationError, Failure, FailureKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import AnswerExamination, HostLimits, LinkReport
from disagg.worker.examination import LOOPBACK_GBITS, expected_bytes_per_s, host_limits, slowness

replace = msgspec.structs.replace
GOOD = HostLimits(max_open_files=65536, max_locked_bytes=-1, shared_memory_bytes=1 << 30, num_cores=4)
LINK = LinkReport(WorkerId("d"), "tcp", False, 1e9, 1e-4, 1.25e9)


def card(name: str, role: Role) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name),
        incarnation=Incarnation(1),
        role=role,
        pool=PoolCard("m", "weights", "tok", Numerics.EXACT, 100, 64),
        layout=KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4),
        num_blocks=8,
        control_address="127.0.0.1:1",
        data_endpoints=(Endpoint(TransportKind.TCP, "127.0.0.1:9"),),
    )


def patient(name: str, role: Role, links: tuple[LinkReport, ...] = (), **changes: Any) -> Patient:
    made = card(name, role)
    answer = AnswerExamination(made, "1.0", GOOD, 0.0, False, links)
    return Patient(made, replace(answer, **changes))


def report(*patients: Patient) -> ClusterReport:
    return ClusterReport("1.0", False, patients)


def test_a_cluster_that_is_well_has_no_findings() -> None:
    assert judge(report(patient("p", Role.PREFILL, (LINK,)), patient("d", Role.DECODE))) == ()
    assert judge(report(patient("m", Role.MIXED))) == ()


def with_link(**changes: Any) -> tuple[Patient, ...]:
    return (patient("p", Role.PREFILL, (replace(LINK, **changes),)), patient("d", Role.DECODE))


LOST = Failure(FailureKind.TRANSFER_FAILED, "d could not be measured: no route")
ILL: dict[str, tuple[tuple[Patient, ...], str]] = {
    "nobody": ((), "no worker is registered"),
    "no answer": ((Patient(card("m", Role.MIXED), None, "refused"),), "m cannot be asked at 127.0.0.1:1: refused"),
    "release": ((patient("m", Role.MIXED, version="0.9"),), "release 0.9, the router 1.0"),
    "tls at one end": ((patient("m", Role.MIXED, is_encrypted=True),), "m uses TLS and the router does not"),
    "few files": ((patient("m", Role.MIXED, limits=replace(GOOD, max_open_files=256)),), "ulimit -n 4096"),
    "clock": ((replace(patient("m", Role.MIXED), clock_skew_s=-3.0),), "-3.0 s off"),
    "slow": (with_link(bytes_per_s=1e8), "0.8 Gbit/s, 8% of the 10 Gbit/s"),
    "no way": (with_link(bytes_per_s=0.0, failure=LOST), "could not be measured: no route; can p reach 127.0.0.1:9?"),
    "not paired": ((patient("p", Role.PREFILL), patient("d", Role.DECODE)), "p -> d: not paired"),
}


@pytest.mark.parametrize("case", ILL)
def test_what_is_wrong_is_found_and_nothing_else(case: str) -> None:
    patients, text = ILL[case]
    (finding,) = judge(report(*patients))
    assert text in finding


def test_names_are_shown_as_they_are() -> None:
    """Also those that a library would take for its own marks."""
    odd = "w[/][bold]"
    patients = patient(odd, Role.PREFILL, (LINK,)), patient("d", Role.DECODE, version="[red]")
    found = report(*patients)
    shown = io.StringIO()
    doctor.show(replace(found, findings=judge(found)), Console(file=shown, width=200))
    assert shown.getvalue().count(odd) >= 2  # among the workers, and the links
    assert "[red]" in shown.getvalue()


def test_unlike_workers_are_named_with_both_values() -> None:
    prefill, decode = patient("p", Role.PREFILL), patient("d", Role.DECODE)
    other = replace(decode, card=replace(decode.card, protocol_min=2, protocol_max=2))
    (finding,) = judge(report(prefill, other))
    assert "protocol range 1..1 is not 2..2" in finding


@pytest.mark.parametrize(("seen_s", "found_s"), [((0.2,), 0.2), ((-3.0, -0.1), -0.1), ((-3.0, -2.0, -4.0), -2.0)])
async def test_an_answer_that_was_late_is_no_late_clock(
    monkeypatch: pytest.MonkeyPatch, seen_s: tuple[float, ...], found_s: float
) -> None:
    """As often as it is asked: what is always late is off."""
    looks = iter(seen_s)

    async def asked(card: WorkerCard, keys: object) -> Patient:
        return replace(patient(str(card.worker_id), card.role), clock_skew_s=next(looks))

    monkeypatch.setattr(examination, "_ask_worker", asked)
    found = await examination._examine(card("m", Role.MIXED), None)
    assert found.clock_skew_s == found_s
    assert list(looks) == []
    assert len(judge(report(found))) == (found_s < -1.0)


def test_only_far_too_slow_is_slow() -> None:
    assert slowness(0.0, 1e9) == ""  # not measured
    assert slowness(1e8, 1e9) == ""
    assert slowness(0.99e8, 1e9) != ""
    assert slowness(1.0, 0.0) == ""  # nobody knows what it should be


def test_what_a_link_should_give_is_as_told_or_as_the_card_says() -> None:
    assert expected_bytes_per_s("10.0.0.1", 40.0) == 5e9
    assert expected_bytes_per_s("127.0.0.1", 0.0) == LOOPBACK_GBITS * 125e6
    assert expected_bytes_per_s("203.0.113.9", 0.0) == 0.0  # no card here has it


def test_limits_are_of_this_process() -> None:
    limits = host_limits()
    assert limits.num_cores >= 1
    assert limits.max_open_files == -1 or limits.max_open_files > 0


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_live_cluster_is_examined_over_its_control_ports(tmp_path: Path, is_encrypted: bool) -> None:
    keys = ""
    if is_encrypted:
        make_keys(tmp_path, ("localhost",), days=90)
        keys = str(tmp_path / "localhost")
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(keys=keys))
        await stack.enter_async_context(live_worker("p", Role.PREFILL, address, keys=keys))
        await stack.enter_async_context(live_worker("d", Role.DECODE, address, keys=keys))
        await paired(served)
        found = await examine_cluster(address, keys)
        assert found.findings == ()
        assert {each.card.worker_id for each in found.patients} == {"p", "d"}
        assert all(abs(each.clock_skew_s) < 1.0 for each in found.patients)
        (link,) = (link for each in found.patients if each.answer for link in each.answer.links if link.peer == "d")
        assert (link.transport, link.is_encrypted) == ("tcp", is_encrypted)
        again = msgspec.json.decode(msgspec.json.encode(found), type=ClusterReport)
        assert again == found
        shown = io.StringIO()
        doctor.show(found, Console(file=shown, width=200))
        for text in ("Nothing is wrong", "p", "d", "tcp", "mutual TLS" if is_encrypted else "no TLS"):
            assert text in shown.getvalue()


async def test_a_worker_that_is_gone_makes_the_doctor_fail(capsys: pytest.CaptureFixture[str]) -> None:
    async with live_router() as (served, address), live_worker("m", Role.MIXED, address) as worker:
        await until(lambda: bool(served.dispatcher.registry.records()))
        assert worker.peers._server is not None
        worker.peers._server.close()  # nobody answers there any more
        code = await asyncio.to_thread(doctor.run_doctor, address, "", as_json=True)
        assert code == 1
        found = msgspec.json.decode(capsys.readouterr().out, type=ClusterReport)
        assert "m cannot be asked" in found.findings[0]


def test_no_router_is_one_plain_line() -> None:
    with pytest.raises(ConfigurationError, match="--router"):
        doctor.run_doctor("127.0.0.1:1", "", as_json=False)
