"""Everything but generation: models, health, metrics, limits, headers."""

import pytest
from tests.unit.router.site import MakeSite, Site

from disagg import __version__
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.access import Access, AccessKey
from disagg.router.body import BodyLimits
from disagg.telemetry.metrics import HTTP_ERRORS, REJECTIONS
from disagg.testing.generation import not_ready, ready


async def test_models(site: Site) -> None:
    listed = (await site.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "bare"]
    assert (await site.client.get("/v1/models/tiny")).json() == listed["data"][0]
    assert listed["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "disagg",
        "max_model_len": 4096,
    }
    missing = await site.client.get("/v1/models/org/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_ready_follows_the_workers_and_health_does_not(make_site: MakeSite) -> None:
    site = make_site(statuses=[not_ready("tiny"), ready("bare")])
    response = await site.client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    site.service.statuses = (not_ready("tiny", "no prefill worker"),)
    alive = await site.client.get("/health")
    assert (alive.status_code, alive.json()["ready"]) == (200, False)
    assert "no prefill worker" in alive.json()["missing"]
    response = await site.client.get("/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "tiny: no prefill worker" in response.json()["missing"]
    assert "bare: the service does not know this model" in response.json()["missing"]


async def test_model_that_is_not_ready(make_site: MakeSite) -> None:
    site = make_site(statuses=[not_ready("tiny", "no decode worker")])
    response = await site.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert "no decode worker" in response.json()["error"]["message"]


async def test_plain_endpoints(site: Site) -> None:
    metrics = await site.client.get("/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"fake_submitted 0" in metrics.content
    assert (await site.client.get("/cluster")).json() == {"workers": []}
    assert (await site.client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_routing_errors(site: Site, method: str, path: str, status: int, code: str) -> None:
    response = await site.client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if status == 405:
        assert response.headers["allow"]


async def test_body_limit(make_site: MakeSite) -> None:
    site = make_site(limits=BodyLimits(1000))
    assert (await site.complete(prompt="x" * 500)).status_code == 200
    declared = await site.complete(prompt="x" * 2000)

    async def parts() -> object:
        for _ in range(20):
            yield b"x" * 100

    undeclared = await site.client.post("/v1/completions", content=parts())  # type: ignore[arg-type]
    for response in (declared, undeclared):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_request_ids(site: Site) -> None:
    drawn = [(await site.client.get(path)).headers["x-request-id"] for path in ("/version", "/nothing")]
    assert len(set(drawn)) == 2
    kept = await site.client.get("/version", headers={"X-Request-ID": "abc-1:2"})
    assert kept.headers["x-request-id"] == "abc-1:2"
    for insane in ("x" * 300, "a b", ""):
        response = await site.client.get("/version", headers={"X-Request-ID": insane})
        assert response.headers["x-request-id"] not in (insane, "")


async def test_tokenize_and_back(site: Site, tokenizer: ModelTokenizer) -> None:
    text = "hello <|im_end|> ďábelské 🙂"
    answer = (await site.client.post("/tokenize", json={"model": "tiny", "prompt": text})).json()
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 4096,
        "tokens": tokenizer.encode(text),
        "token_strs": None,
    }
    back = await site.client.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    chat = (await site.client.post("/tokenize", json=body)).json()
    assert "".join(chat["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    open_ended = (await site.client.post("/tokenize", json={**body, "add_generation_prompt": False})).json()
    assert "".join(open_ended["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "x"}, 400, "model"),  # two are served
        ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "tiny"}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "messages": [], "add_special_tokens": "no"}, 400, "add_special_tokens"),
        ("/tokenize", {"model": "tiny", "messages": [], "prompt": 5}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "prompt": "x", "tools": 5}, 400, "tools"),
        ("/tokenize", {"model": "tiny", "prompt": [1]}, 400, "prompt"),
        ("/tokenize", {"model": "tiny", "messages": []}, 400, "messages"),
        ("/detokenize", {"model": "tiny"}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": []}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": [10_000]}, 400, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": [-1]}, 400, "tokens"),
    ],
)
async def test_bad_tokens(site: Site, path: str, body: dict[str, object], status: int, param: str) -> None:
    response = await site.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_json_that_is_too_deep(make_site: MakeSite) -> None:
    site = make_site(limits=BodyLimits(max_depth=6))
    assert (await site.complete(made_up=[[[[1]]]])).status_code == 200
    too_deep: list[object] = [[[[[[[1]]]]]], {"a": {"b": {"c": {"d": {"e": {}}}}}}]
    for deep in too_deep:
        response = await site.complete(made_up=deep)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        assert "6 levels" in response.json()["error"]["message"]


async def test_errors_are_counted_by_status_and_what_ready_says_is_none(make_site: MakeSite) -> None:
    site = make_site(statuses=[not_ready("tiny")], access=Access([AccessKey(key="sk-0123456789", name="a")]))
    assert (await site.chat()).status_code == 401
    assert (await site.chat()).status_code == 401
    assert (await site.client.get("/nothing")).status_code == 404
    assert (await site.client.get("/v1/chat/completions")).status_code == 405
    assert (await site.client.get("/ready")).status_code == 503
    assert (await site.client.get("/version")).status_code == 200
    counted = {label: total for name, label, total in site.service.counters.items() if name == HTTP_ERRORS.name}
    assert counted == {"401": 2, "404": 1, "405": 1}
    site.service.counters.check_invariants()


async def test_who_has_used_up_his_share_is_counted_as_turned_away(make_site: MakeSite) -> None:
    key = AccessKey(key="sk-0123456789", name="a", requests_per_minute=1)
    site = make_site(access=Access([key]))
    site.client.headers["Authorization"] = "Bearer sk-0123456789"
    assert [(await site.complete()).status_code for _ in range(2)] == [200, 429]
    assert site.service.counters.get(REJECTIONS, "rate_limited") == 1
    assert site.service.counters.get(HTTP_ERRORS, "429") == 1
