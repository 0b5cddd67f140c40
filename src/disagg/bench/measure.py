"""One load against one server, from URL to figures."""

import asyncio
import random
from collections.abc import Callable

import msgspec

from disagg.bench.client import Api, OpenAiClient, find_model
from disagg.bench.figures import Figures, figures
from disagg.bench.http_client import HttpClient
from disagg.bench.load import LoadLimits, LoadLoop
from disagg.bench.observation import Observation, Observer, joined
from disagg.bench.prompts import PromptSource
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo
from disagg.bench.workload import Workload

OnRecord = Callable[[RequestRecord], None]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked, and how. model: empty for the first that the server names. ids: for Api.IDS."""

    url: str
    model: str = ""
    api: Api = Api.CHAT
    api_key: str = ""
    timeout_s: float = 300.0
    ids: tuple[int, ...] = ()
    ignore_eos: bool = True


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one load gave. rate_per_s: as asked; NaN where no clock decides."""

    label: str
    rate_per_s: float
    records: tuple[RequestRecord, ...]
    figures: Figures
    observation: Observation = Observation()


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. seed: of lengths and times; prompt_seed: of the words, so that no run finds another's prefixes."""

    workload: Workload
    slo: Slo
    label: str = ""
    rate_per_s: float = float("nan")
    seed: int = 0
    prompt_seed: int = 0
    limits: LoadLimits = LoadLimits()


def measure(target: Target, plan: LoadPlan, on_record: OnRecord = lambda record: None) -> LoadResult:
    """Blocking. Raises ConfigurationError for a server that does not answer at all."""
    return asyncio.run(_measure(target, plan, on_record))


async def _measure(target: Target, plan: LoadPlan, on_record: OnRecord) -> LoadResult:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    prompts = PromptSource(plan.prompt_seed, target.ids)
    async with HttpClient(target.url, headers) as http, HttpClient(target.url, headers) as beside:
        model = target.model or await find_model(http)
        client = OpenAiClient(
            http,
            prompts,
            api=target.api,
            model=model,
            timeout_s=target.timeout_s,
            seed=plan.seed,
            ignore_eos=target.ignore_eos,
        )
        loop = LoadLoop(client, plan.limits, on_record)
        async with Observer(beside, lambda: loop.start_s) as observer:
            records = await loop.run(plan.workload, random.Random(plan.seed))
        return LoadResult(
            label=plan.label,
            rate_per_s=plan.rate_per_s,
            records=tuple(records),
            figures=figures(records, plan.slo, plan.seed),
            observation=observer.observation(),
        )


def merge(results: list[LoadResult], seed: int = 0) -> LoadResult:
    """Rounds of the same load as one. Rates are means over the rounds; observations are put end to end."""
    first = results[0]
    if len(results) == 1:
        return first
    records: list[RequestRecord] = []
    observations: list[tuple[float, Observation]] = []
    offset_s, number = 0.0, 0
    for result in results:
        records += [shifted(record, offset_s, number) for record in result.records]
        observations.append((offset_s, result.observation))
        offset_s = max((record.end_s for record in records), default=offset_s)
        number += 1 + max((record.number for record in result.records), default=0)
    return LoadResult(
        label=first.label,
        rate_per_s=first.rate_per_s,
        records=tuple(records),
        figures=figures(records, first.figures.slo, seed),
        observation=joined(observations),
    )


def shifted(record: RequestRecord, by_s: float, number: int) -> RequestRecord:
    """The same, later, and with a number of its own."""
    return msgspec.structs.replace(
        record,
        number=record.number + number,
        due_s=record.due_s + by_s,
        sent_s=record.sent_s + by_s if record.sent_s else 0.0,
        end_s=record.end_s + by_s,
        token_s=tuple(at_s + by_s for at_s in record.token_s),
    )
