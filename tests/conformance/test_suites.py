"""Suites that look for faults in servers of this API: `make conformance`.

schemathesis draws right and wrong bodies from an OpenAPI document: nothing may end in a 5xx, no wrong body may be
taken, every answer must be what the document says. compare-logprobs puts two deployments side by side.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conformance.served import KEY, MODEL, PATHS, Served, program, run, serving

from disagg.router.description import WRITING, Endpoint, body_schema
from disagg.testing.model_files import write_tiny_llama

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,negative_data_rejection"
MAX_EXAMPLES = os.environ.get("CONFORMANCE_EXAMPLES", "10")
SUITE_TIMEOUT_S = 400.0
OPENAI_SPEC = "OPENAI_SPEC"
OPENAI_BODIES = {"CreateChatCompletionRequest": Endpoint.CHAT, "CreateCompletionRequest": Endpoint.COMPLETIONS}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A short context: bodies without max_tokens write until it ends."""
    model = write_tiny_llama(tmp_path_factory.mktemp("small") / MODEL, max_context=96)
    with serving("disaggregated", model, tmp_path_factory.mktemp("keys") / "keys.toml") as made:
        yield made


def schemathesis(document: Path, url: str, *more: str) -> None:
    asked = ("--checks", CHECKS, "--max-examples", MAX_EXAMPLES, "--phases", "examples,coverage,fuzzing")
    how = ("--seed", "1", "--request-timeout", "60", "--continue-on-failure", "--no-shrink", "--warnings", "off")
    who = ("-H", f"Authorization: Bearer {KEY}")
    done = run((program("st"), "run", document, "--url", url, *asked, *how, *who, *more), SUITE_TIMEOUT_S)
    print(done.stdout[-1500:])
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-2000:]}"


def test_our_own_description(small: Served, tmp_path: Path) -> None:
    document: dict[str, Any] = httpx.get(f"{small.url}/openapi.json", trust_env=False, timeout=10.0).json()
    for endpoint in Endpoint:
        body = document["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]["schema"]
        # Or nearly every body were for a model that is not there.
        body["properties"]["model"] = {"enum": [MODEL] if endpoint in WRITING else [MODEL, None]}
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    schemathesis(tmp_path / "openapi.json", small.url)


def test_openais_description(small: Served, tmp_path: Path) -> None:
    """As far as docs/api.md takes its parameters: what is ignored may be anything."""
    path = os.environ.get(OPENAI_SPEC)
    if not path:
        pytest.skip(f"{OPENAI_SPEC} names no file: give the path of OpenAI's OpenAPI description as JSON")
    document: dict[str, Any] = json.loads(Path(path).read_text())
    schemas = document["components"]["schemas"]
    for name, endpoint in OPENAI_BODIES.items():
        _keep(schemas[name], set(body_schema(endpoint)["properties"]))
        _set_model(schemas[name])
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    which = ("--include-path-regex", "^/(chat/completions|completions|models)$")
    schemathesis(tmp_path / "openapi.json", f"{small.url}/v1", *which, "--exclude-operation-id", "listChatCompletions")


def _parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *(part for part in schema.get("allOf", []) if "properties" in part)]


def _keep(schema: dict[str, Any], taken: set[str]) -> None:
    for part in _parts(schema):
        for name in set(part.get("properties", {})) - taken:
            del part["properties"][name]


def _set_model(schema: dict[str, Any]) -> None:
    for part in _parts(schema):
        if "model" in part.get("properties", {}):
            part["properties"]["model"] = {"const": MODEL}


def test_logprobs_are_those_of_a_mixed_deployment(model: Path, tmp_path: Path) -> None:
    compare = program("xpyd-acc")
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving(name, model, tmp_path / name)).url for name in PATHS}
        between = ("--baseline", urls["mixed"], "--target", urls["disaggregated"])
        how = ("--model", MODEL, "--max-tokens", "16", "--temperature", "0", "--api-key", KEY, "--kl-threshold", "1e-6")
        for prompt in ("Hello world", "the quick brown fox jumps over the lazy dog " * 12):
            done = run((compare, "compare-logprobs", *between, *how, "--prompt", prompt), SUITE_TIMEOUT_S)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            for word in ("Tokens compared: 16", "MATCH", "Flagged positions:  0"):
                assert word in done.stdout, done.stdout
