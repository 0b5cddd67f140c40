"""What a scrape shows: the router's counters, and every worker's with its own labels."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.dispatch.rigs import Desk, card

from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.policy.routing import Path
from disagg.protocol.messages import CounterValue, LinkState, ReportState, WorkerState
from disagg.router.metrics import RouterMetrics
from disagg.telemetry.metrics import (
    ALL_METRICS,
    BLOCKS,
    ITL_SECONDS,
    MAX_LABEL_VALUES,
    MESSAGES_IGNORED,
    PUSHES,
    STEPS,
    TTFT_SECONDS,
    MetricKind,
)


def scrape(metrics: RouterMetrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and each.labels == labels
    ]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


def test_every_metric_of_the_table_is_there_under_its_own_name() -> None:
    desk = Desk().with_pair()
    families = scrape(RouterMetrics(desk.dispatcher))
    for metric in ALL_METRICS:
        name = metric.name.removesuffix("_total") if metric.kind is MetricKind.COUNTER else metric.name
        assert families[name].type == metric.kind.value
        assert families[name].documentation == metric.help


def test_the_routers_counters_carry_their_labels() -> None:
    desk = Desk().with_pair()
    metrics = RouterMetrics(desk.dispatcher)
    request_id, _ = desk.submit(max_tokens=1)
    desk.submit()
    desk.emit("p0", request_id, 0)
    families = scrape(metrics)
    assert value(families, "disagg_requests_total", outcome="finished") == 1
    assert value(families, "disagg_placements_total", reason="long_prompt") == 2
    assert value(families, "disagg_requests_open") == 1
    assert value(families, "disagg_prompt_tokens_total") == 20
    assert value(families, "disagg_generation_tokens_total") == 1


def test_what_a_moved_sequence_reads_again_is_counted_by_where_its_kv_came_from() -> None:
    desk = Desk().with_pair()
    desk.register(card("d1", Role.DECODE))
    desk.pair("p0", "d1")
    request_id, _ = desk.submit()
    desk.read("p0", request_id, num_cached=4)
    assert value(scrape(RouterMetrics(desk.dispatcher)), "disagg_moved_tokens_total", how="cached") == 0
    desk.lose("d0")
    desk.read("p0", request_id, num_cached=8, attempt=2)
    families = scrape(RouterMetrics(desk.dispatcher))
    assert value(families, "disagg_moved_tokens_total", how="cached") == 8
    assert value(families, "disagg_moved_tokens_total", how="computed") == 2


def test_a_workers_values_carry_its_name_role_and_model_until_it_is_gone() -> None:
    desk = Desk().with_pair()
    metrics = RouterMetrics(desk.dispatcher)
    counters = (CounterValue(STEPS.name, "decode", 12.0), CounterValue("disagg_unheard_of_total", "x", 1.0))
    state = WorkerState(num_free_blocks=3, num_quarantined_blocks=2, num_running=4, counters=counters)
    desk.hear("d0", ReportState(state))
    families = scrape(metrics)
    whose = {"worker": "d0", "role": "decode", "model": "model"}
    assert value(families, "disagg_steps_total", kind="decode", **whose) == 12
    assert value(families, "disagg_blocks", state="free", **whose) == 3
    assert value(families, "disagg_blocks", state="quarantined", **whose) == 2
    assert value(families, "disagg_sequences_running", **whose) == 4
    assert value(families, "disagg_worker_up", **whose) == 1
    assert "disagg_unheard_of" not in families
    desk.lose("d0")
    assert b'worker="d0"' not in metrics.text()


def test_times_go_into_the_histogram_of_their_path() -> None:
    metrics = RouterMetrics(Desk().dispatcher)
    metrics.times(TTFT_SECONDS, Path.REMOTE).observe(0.2)
    metrics.times(ITL_SECONDS, Path.LOCAL).observe(0.03)
    metrics.times(ITL_SECONDS, Path.REMOTE)  # nothing was observed there
    families = scrape(metrics)
    assert value(families, "disagg_time_to_first_token_seconds_count", path="remote") == 1
    assert value(families, "disagg_time_to_first_token_seconds_bucket", path="remote", le="0.1") == 0
    assert value(families, "disagg_time_to_first_token_seconds_bucket", path="remote", le="0.25") == 1
    assert value(families, "disagg_inter_token_latency_seconds_sum", path="local") == 0.03
    assert {each.labels["path"] for each in families[ITL_SECONDS.name].samples} == {"local"}


def test_counters_of_the_router_are_there_before_the_first_count() -> None:
    families = scrape(RouterMetrics(Desk().dispatcher))
    assert value(families, "disagg_rejections_total", reason="overloaded") == 0
    assert value(families, "disagg_placements_total", reason="no_prefill_worker") == 0
    assert value(families, "disagg_prompt_tokens_total") == 0


def test_a_model_is_ready_once_it_can_be_served_and_its_queue_is_seen() -> None:
    desk = Desk()
    metrics = RouterMetrics(desk.dispatcher)
    assert value(scrape(metrics), "disagg_model_ready", model="model") == 0
    desk.with_pair()
    families = scrape(metrics)
    assert value(families, "disagg_model_ready", model="model") == 1
    assert value(families, "disagg_choices_waiting") == 0
    desk.lose("d0")
    desk.submit()
    assert value(scrape(metrics), "disagg_choices_waiting") == 1


def test_links_are_shown_to_workers_that_are_there() -> None:
    desk = Desk().with_pair()
    links = (LinkState(WorkerId("d0"), 5e6), LinkState(WorkerId("gone"), 7e6))
    desk.hear("p0", ReportState(WorkerState(links=links)))
    text = RouterMetrics(desk.dispatcher).text().decode()
    assert 'disagg_link_bytes_per_second{worker="p0",role="prefill",model="model",peer="d0"} 5000000' in text
    assert "gone" not in text
    desk.lose("d0")
    assert 'peer="d0"' not in RouterMetrics(desk.dispatcher).text().decode()


def test_nothing_that_a_worker_says_becomes_a_series_without_end() -> None:
    desk = Desk().with_pair()
    made_up = [CounterValue(STEPS.name, f"kind-{number}", 1.0) for number in range(1000)]
    made_up += [CounterValue(MESSAGES_IGNORED.name, f"message-{number}", 1.0) for number in range(1000)]
    made_up += [CounterValue(PUSHES.name, f"label-{number}", 1.0) for number in range(1000)]
    made_up += [CounterValue("disagg_blocks", "stolen", 1.0), CounterValue("up", "", 1.0)]
    desk.hear("d0", ReportState(WorkerState(counters=tuple(made_up))))
    families = scrape(RouterMetrics(desk.dispatcher))
    whose = {"worker": "d0", "role": "decode", "model": "model"}
    assert value(families, STEPS.name, kind="other", **whose) == 1000
    assert value(families, PUSHES.name, **whose) == 1000
    ignored = families[MESSAGES_IGNORED.name.removesuffix("_total")].samples
    assert len(ignored) == MAX_LABEL_VALUES + 1
    assert sum(sample.value for sample in ignored) == 1000
    assert {sample.labels["state"] for sample in families["disagg_blocks"].samples} == set(BLOCKS.values)
