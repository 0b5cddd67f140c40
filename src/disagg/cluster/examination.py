"""Asks a running cluster how it stands, and finds what is wrong. Asking does I/O, judging does not.

1. the router: who is here
2. every worker, at its own control port: its machine, and each of its links measured anew
3. findings: what an operator should do something about
"""

import datetime
import time
from pathlib import Path

import msgspec

from disagg import __version__
from disagg.channel.channel import Channel, dial
from disagg.channel.keys import Keys, load_keys
from disagg.cluster.authority import days_left
from disagg.core.errors import ConfigurationError, PeerFault
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import (
    AnswerCluster,
    AnswerExamination,
    LinkReport,
    RequestCluster,
    RequestExamination,
    RouterToWorker,
    WorkerToWorker,
)
from disagg.protocol.pairing import is_handoff_pair, pairing_failure
from disagg.worker.examination import slowness

ANSWER_TIMEOUT_S = 10.0  # measuring many links takes a while
MIN_OPEN_FILES = 4096
MIN_DAYS_LEFT = 14.0
MAX_SKEW_S = 1.0  # more than that makes logs of two machines hard to read side by side
NUM_LOOKS = 3  # at a clock that seems to be late

_FROM_ROUTER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)


class Patient(msgspec.Struct, frozen=True):
    """One worker: what it answered, or why it did not."""

    card: WorkerCard
    answer: AnswerExamination | None
    failure: str = ""
    clock_skew_s: float = 0.0  # ahead of this machine, less what the answer took on its way here


class ClusterReport(msgspec.Struct, frozen=True):
    """Everything that was found out."""

    router_version: str
    is_encrypted: bool
    patients: tuple[Patient, ...]
    findings: tuple[str, ...] = ()  # plain sentences, each with what to do


async def examine_cluster(router_address: str, keys_directory: str) -> ClusterReport:
    """Raises ConfigurationError when the router cannot be asked."""
    keys = load_keys(keys_directory)
    cluster = await _ask_router(router_address, keys)
    # One after the other: links that are measured at once would each look slower than they are.
    patients = tuple([await _examine(card, keys) for card in cluster.cards])
    report = ClusterReport(cluster.version, cluster.is_encrypted, patients)
    findings = judge(report)
    if keys_directory:
        findings += _expiry(keys_directory)
    return msgspec.structs.replace(report, findings=findings)


async def _ask_router(address: str, keys: Keys | None) -> AnswerCluster:
    try:
        channel = await dial(address, _FROM_ROUTER, timeout_s=ANSWER_TIMEOUT_S, tls=keys.dialling if keys else None)
        try:
            channel.send(RequestCluster())
            answer = await channel.receive(ANSWER_TIMEOUT_S)
        finally:
            await channel.close()
    except PeerFault as error:
        hint = "" if keys else ", with --keys where the cluster has them"
        raise ConfigurationError(f"the router's control port: {error}; name it with --router{hint}") from None
    if not isinstance(answer, AnswerCluster):
        raise ConfigurationError(f"{address} answered with {type(answer).__name__}, which no router does")
    return answer


async def _examine(card: WorkerCard, keys: Keys | None) -> Patient:
    """Asked again where its clock seems to be late: that of one whose answer had to wait for its turn does, too."""
    patient = await _ask_worker(card, keys)
    for _ in range(NUM_LOOKS - 1):
        if patient.clock_skew_s >= -MAX_SKEW_S:
            break
        again = await _ask_worker(card, keys)
        if again.answer is not None and again.clock_skew_s > patient.clock_skew_s:
            patient = again
    return patient


async def _ask_worker(card: WorkerCard, keys: Keys | None) -> Patient:
    tls = keys.dialling if keys else None
    try:
        channel: Channel[WorkerToWorker] = await dial(
            card.control_address, _FROM_WORKER, timeout_s=ANSWER_TIMEOUT_S, tls=tls
        )
        try:
            channel.send(RequestExamination())
            answer = await channel.receive(ANSWER_TIMEOUT_S)
            now_s = time.time()  # it reads its clock just before it answers
        finally:
            await channel.close()
    except PeerFault as error:
        return Patient(card, None, str(error))
    if not isinstance(answer, AnswerExamination):
        return Patient(card, None, f"it answered with {type(answer).__name__}")
    return Patient(card, answer, clock_skew_s=answer.clock_s - now_s)


def judge(report: ClusterReport) -> tuple[str, ...]:
    """What is wrong, worst first within each worker. Pure."""
    findings: list[str] = []
    if not report.patients:
        findings.append("no worker is registered: start some with disagg worker, or look at their last lines")
    for patient in report.patients:
        findings += _judge_worker(patient, report)
    answered = [patient for patient in report.patients if patient.answer is not None]
    for source in answered:
        findings += _judge_links(source, report)
    return tuple(findings)


def _judge_worker(patient: Patient, report: ClusterReport) -> list[str]:
    name, answer = patient.card.worker_id, patient.answer
    if answer is None:
        return [f"{name} cannot be asked at {patient.card.control_address}: {patient.failure}; look at its last lines"]
    found = []
    if answer.card.incarnation != patient.card.incarnation:
        found.append(f"{name} has been started anew since the router heard of it: ask again in some seconds")
    if answer.version != report.router_version:
        found.append(f"{name} runs release {answer.version}, the router {report.router_version}: upgrade the older")
    if answer.is_encrypted != report.is_encrypted:
        has, lacks = (name, "the router") if answer.is_encrypted else ("the router", name)
        found.append(f"{has} uses TLS and {lacks} does not: give both --keys")
    limits = answer.limits
    if 0 <= limits.max_open_files < MIN_OPEN_FILES:
        found.append(f"{name} may open {limits.max_open_files} files: raise it with ulimit -n {MIN_OPEN_FILES}")
    if abs(patient.clock_skew_s) > MAX_SKEW_S:
        text = f"the clock of {name} is {patient.clock_skew_s:+.1f} s off: logs will not line up"
        found.append(f"{text}; keep it right with NTP (nothing here depends on it)")
    return found


def _judge_links(source: Patient, report: ClusterReport) -> list[str]:
    assert source.answer is not None
    links = {link.peer: link for link in source.answer.links}
    found = []
    for target in report.patients:
        if target.card.worker_id == source.card.worker_id or not is_handoff_pair(source.card, target.card):
            continue
        found += _judge_pair(source.card, target.card, links.get(target.card.worker_id))
    return found


def _judge_pair(source: WorkerCard, target: WorkerCard, link: LinkReport | None) -> list[str]:
    pair = f"{source.worker_id} -> {target.worker_id}"
    refusal = pairing_failure(source, target)
    if refusal is not None:
        return [f"{pair}: {refusal.message}; make them alike, or serve them under different names"]
    if link is None:
        return [f"{pair}: not paired; can {source.worker_id} reach {target.control_address}?"]
    if link.failure is not None:
        where = ", ".join(endpoint.address for endpoint in target.data_endpoints)
        return [f"{pair}: {link.failure.message}; can {source.worker_id} reach {where}?"]
    slow = slowness(link.bytes_per_s, link.expected_bytes_per_s)
    return [f"{pair}: only {slow}; look at the link, or say with --link-gbits what it is"] if slow else []


def _expiry(directory: str) -> tuple[str, ...]:
    left = days_left(Path(directory), datetime.datetime.now(datetime.UTC))
    if left > MIN_DAYS_LEFT:
        return ()
    return (f"the keys in {directory} expire in {left:.0f} days: make new ones with disagg keys",)


def versions(report: ClusterReport) -> str:
    """One line: this program's release, the router's, and the workers'."""
    workers = sorted({patient.answer.version for patient in report.patients if patient.answer is not None})
    return f"release {__version__} here, {report.router_version} at the router, {', '.join(workers) or '-'} at workers"


def handoff_links(report: ClusterReport) -> list[tuple[Patient, Patient, LinkReport | None]]:
    """Every pair between which prompts are handed off, from the reading end."""
    pairs = []
    for source in report.patients:
        links = {link.peer: link for link in source.answer.links} if source.answer is not None else {}
        for target in report.patients:
            if target is not source and is_handoff_pair(source.card, target.card):
                pairs.append((source, target, links.get(target.card.worker_id)))
    return pairs
