"""Clients that people use, each in an environment of its own: `make conformance`."""

import json
from pathlib import Path

import pytest
from tests.conformance.served import KEY, MODEL, NODE_FOLDER, Served, node, program, report, run

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(400)]
TOUR_TIMEOUT_S = 180.0


@pytest.mark.parametrize("tour", ["litellm_tour", "langchain_tour", "pydantic_ai_tour", "instructor_tour"])
def test_python_client(served: Served, tour: str) -> None:
    where = ("-m", f"tests.conformance.tours.{tour}")
    report(run((program("python"), *where, f"{served.url}/v1", MODEL, KEY), TOUR_TIMEOUT_S))


@pytest.mark.parametrize("tour", ["openai.mjs", "ai-sdk.mjs"])
def test_node_client(served: Served, tour: str) -> None:
    report(run((node(), NODE_FOLDER / tour, f"{served.url}/v1", MODEL, KEY), TOUR_TIMEOUT_S))


def test_llm_command(served: Served, tmp_path: Path) -> None:
    """Streamed, whole, and with a schema."""
    card = {"model_id": "local", "model_name": MODEL, "api_base": f"{served.url}/v1", "supports_schema": True}
    card |= {"api_key_name": "disagg"}  # or it sends no key, whatever is said on the command line
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([card]))  # JSON is YAML
    ask = (program("llm"), "-m", "local", "hi", "--key", KEY, "-o", "temperature", "0")

    def answer(*more: str) -> str:
        done = run((*ask, *more), TOUR_TIMEOUT_S, LLM_USER_PATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return done.stdout

    streamed, whole = answer("-o", "max_tokens", "8"), answer("-o", "max_tokens", "8", "--no-stream")
    assert streamed == whole
    assert streamed.strip()
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    assert json.loads(answer("-o", "max_tokens", "200", "--schema", json.dumps(schema)))["n"] in (1, 2)
