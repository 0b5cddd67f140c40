"""docs/api.md says what the router does: each row of its tables is tried, and nothing that is read is missing."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import jsonschema
import msgspec
import pytest
from tests.unit.router.site import MakeSite, Site

from disagg.router import answer_plan, app, openai_types, response_format
from disagg.router.access import Access, AccessKey
from disagg.router.description import WRITING, Endpoint, body_schema
from disagg.router.tools import spec
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import ChoiceTimeline
from disagg.testing.generation import FakeGenerationService, ready

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()
TOOLS = [{"type": "function", "function": {"name": "f"}}]
WRONG: list[list[list[int]]] = [[[]]]  # of a type that no parameter has
LOGPROBS = {"chat": "true", "completions": "2"}
READS = re.compile(r'\.(?:text|identifier|boolean|integer|number|nested|array|required|refuse_unless|has)\(\s*"(\w+)"')
FILES = (openai_types, answer_plan, response_format, spec)
TOLD = set(ChoiceTimeline.__struct_fields__) - {"choice", "outcome", "stages", "num_output_tokens"}
TOLD -= {"ttft_s", "first_gap_s", "total_s"}  # what the parts add up to
INNER = {"include_usage", "continuous_usage_stats"}
INNER |= {"role", "content", "name", "type", "text", "tool_calls", "reasoning_content"}  # of messages
INNER |= {"json_schema", "schema", "strict", "function", "parameters", "description"}  # of formats and tools


class Row(NamedTuple):
    """One parameter."""

    name: str
    chat: str
    completions: str
    example: str

    def fields(self, endpoint: str) -> dict[str, object]:
        return dict(json.loads(self.example.replace("LOGPROBS", LOGPROBS[endpoint])))

    def word(self, endpoint: str) -> str:
        return self.chat if endpoint == "chat" else self.completions


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    lines = table.group(0).splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


PARAMETERS = [Row(*(cell.strip(" |`") for cell in cells[:4])) for cells in rows("Parameters")]


async def ask(site: Site, endpoint: str, fields: dict[str, object]) -> httpx.Response:
    return await (site.chat if endpoint == "chat" else site.complete)(**fields)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
async def test_every_parameter_does_what_its_row_says(site: Site, row: Row, endpoint: str) -> None:
    word, fields = row.word(endpoint), row.fields(endpoint)
    assert word in ("yes", "refused", "ignored")
    plain = await ask(site, endpoint, {name: value for name, value in fields.items() if name != row.name})
    assert plain.status_code == 200
    response = await ask(site, endpoint, fields)
    if word == "refused":
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"].startswith(row.name)
        return
    assert response.status_code == 200, response.text
    wrong = await ask(site, endpoint, {**fields, row.name: WRONG})
    if word == "yes":
        assert (wrong.status_code, wrong.json()["error"]["param"].startswith(row.name)) == (400, True)
        return
    assert wrong.status_code == 200
    first, *others = (stream.request for stream in site.service.streams)
    for other in others:
        assert other == first, "an ignored parameter has changed what is asked of the workers"


def test_no_parameter_is_missing() -> None:
    source = "".join(Path(file.__file__ or "").read_text() for file in FILES)
    named = {row.name for row in PARAMETERS}
    known = {*READS.findall(source), *openai_types.REFUSED, *openai_types.REFUSED_IN_CHAT} - INNER
    assert known <= named, f"not in docs/api.md: {known - named}"
    assert len(named) == len(PARAMETERS)


def test_every_endpoint_has_a_row() -> None:
    service = FakeGenerationService([ready("tiny")])
    with ThreadPoolExecutor(1, thread_name_prefix="text") as threads:
        made = app.endpoints(service, {}, threads)
    table = [(method, path) for method, path, *_ in rows("Endpoints")]
    assert table == [(method, path) for method, path, _ in made]
    for word in app.UNSUPPORTED:
        assert f"`{word}`" in PAGE


@pytest.mark.parametrize("endpoint", WRITING)
def test_the_description_takes_what_the_page_takes_and_nothing_else(endpoint: Endpoint) -> None:
    word = "chat" if endpoint is Endpoint.CHAT else "completions"
    schema = body_schema(endpoint)
    taken = {row.name for row in PARAMETERS if row.word(word) == "yes"}
    assert set(schema["properties"]) == taken
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for row in PARAMETERS:
        validator.validate({**plain, **row.fields(word)})
        if row.name in taken:
            with pytest.raises(jsonschema.ValidationError):
                validator.validate({**plain, **row.fields(word), row.name: WRONG})


def test_the_description_of_token_endpoints_is_the_pages() -> None:
    found = re.search(r"`/tokenize` takes(.*?)`/detokenize` takes(.*?)\.", PAGE, re.DOTALL)
    assert found is not None
    for endpoint, text in zip((Endpoint.TOKENIZE, Endpoint.DETOKENIZE), found.groups(), strict=True):
        assert set(re.findall(r"`(\w+)`", text)) == set(body_schema(endpoint)["properties"])


async def test_the_description_names_every_endpoint(site: Site) -> None:
    document = (await site.client.get("/openapi.json")).json()
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == {(method, path.replace(":path}", "}")) for method, path, *_ in rows("Endpoints")}


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"tools": TOOLS}, {"n": 2}])
async def test_answers_are_what_the_description_says(site: Site, fields: dict[str, object]) -> None:
    document = (await site.client.get("/openapi.json")).json()
    for path, response in (
        ("/v1/chat/completions", await site.chat(**fields)),
        ("/v1/completions", await site.complete(logprobs=2 if "logprobs" in fields else None)),
        ("/tokenize", await site.client.post("/tokenize", json={"model": "tiny", "prompt": "hi"})),
    ):
        assert response.status_code == 200, response.text
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(response.json(), {**schema, "components": document["components"]})


async def test_the_endpoints_that_need_a_key_are_those_that_say_so(make_site: MakeSite) -> None:
    site = make_site(access=Access([AccessKey(key="sk-0123456789", name="a")]))
    for method, path, needed, _ in rows("Endpoints"):
        response = await site.client.request(method, path.replace("{model:path}", "tiny"), content=b"{}")
        assert (response.status_code == 401) == (needed == "yes"), path


async def test_other_parts_of_the_api_are_refused_by_name(site: Site) -> None:
    for word in app.UNSUPPORTED:
        response = await site.client.post(f"/v1/{word}/anything", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_endpoint")
    assert (await site.client.get("/v1/embeddings")).json()["error"]["code"] == "unsupported_endpoint"


def test_the_keys_file_of_the_page_is_one() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    named = set(re.findall(r"^(\w+) =", block.group(1), re.MULTILINE))
    assert named == {field.name for field in msgspec.structs.fields(AccessKey)}


def test_every_stage_has_a_row_in_order() -> None:
    assert [name for name, *_ in rows("Timeline")] == [stage.value for stage in Stage]
    assert all(f"`{name}`" in PAGE for name in TOLD)


def test_the_flags_are_there() -> None:
    from disagg.router.config import RouterConfig

    flags = set(re.findall(r"`--([\w-]+)`", PAGE))
    names = {field.name.replace("_", "-") for field in msgspec.structs.fields(RouterConfig)}
    assert flags <= names | {"api-key", "cors-origin"}, flags - names
