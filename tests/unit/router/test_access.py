"""Keys, shares, urgency, browsers, and what a client must not decide."""

from pathlib import Path

import httpx
import pytest
from tests.unit.router.site import MakeSite, Site

from disagg.core.errors import ConfigurationError, NotAuthenticated
from disagg.router.access import Access, AccessKey, load_access

KEYS = """
[[keys]]
name = "team-a"
key = "sk-team-a-0123"
requests_per_minute = 2
priority = 1
max_priority = 5
slo_class = "chat"
slo_classes = ["batch"]

[[keys]]
name = "team-b"
key = "sk-team-b-0123"
tokens_per_minute = 30
"""


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return load_access(("sk-single-key",), str(path))


@pytest.fixture
def site(make_site: MakeSite, access: Access) -> Site:
    return make_site(access=access)


async def complete(site: Site, key: str | None, **headers: str) -> httpx.Response:
    given = headers if key is None else {"Authorization": f"Bearer {key}", **headers}
    return await site.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}, headers=given)


@pytest.mark.parametrize(
    ("key", "code"), [(None, "missing_api_key"), ("sk-wrong-key", "invalid_api_key"), ("", "invalid_api_key")]
)
async def test_without_a_key_nothing_is_looked_at(site: Site, key: str | None, code: str) -> None:
    response = await complete(site, key)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (401, "authentication_error", code)
    assert response.headers["www-authenticate"] == "Bearer"
    assert site.service.streams == []
    assert "sk-" not in response.text


async def test_which_endpoints_need_a_key(site: Site) -> None:
    asked = {
        "GET": ("/v1/models", "/v1/models/tiny"),
        "POST": ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
    }
    for method, paths in asked.items():
        for path in paths:
            assert (await site.client.request(method, path, content=b"{}")).status_code == 401, path
    for path in ("/health", "/ready", "/version", "/metrics", "/cluster"):
        assert (await site.client.get(path)).status_code == 200, path


async def test_a_key_is_a_tenant_whose_prompts_are_its_own(site: Site) -> None:
    for key in ("sk-team-a-0123", "sk-single-key"):
        assert (await complete(site, key)).status_code == 200
    first, second = (stream.request for stream in site.service.streams)
    assert (first.tenant, first.cache_salt, first.priority, first.slo_class) == ("team-a", "team-a", 1, "chat")
    assert (second.tenant, second.cache_salt, second.priority, second.slo_class) == ("key-1", "key-1", 0, "default")


async def test_requests_per_minute(site: Site) -> None:
    statuses = [(await complete(site, "sk-team-a-0123")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = await complete(site, "sk-team-a-0123")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert (await complete(site, "sk-single-key")).status_code == 200  # others are not touched
    assert len(site.service.streams) == 3


async def test_tokens_per_minute_count_prompts_and_answers(site: Site) -> None:
    headers = {"Authorization": "Bearer sk-team-b-0123"}
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 16}
    assert (await site.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    refused = await site.client.post("/v1/completions", json={**body, "prompt": [5]}, headers=headers)
    assert refused.status_code == 429
    # 30 - 20 - 16 tokens: seven are to flow in for a prompt of one, at one in two seconds.
    assert int(refused.headers["retry-after"]) in (14, 15)


async def test_how_urgent_a_request_may_be(site: Site) -> None:
    a = "sk-team-a-0123"
    assert (await complete(site, a, **{"X-Priority": "5", "X-SLO-Class": "batch"})).status_code == 200
    assert (site.service.streams[0].request.priority, site.service.streams[0].request.slo_class) == (5, "batch")
    assert (await complete(site, a, **{"X-Priority": "-3"})).status_code == 200
    assert site.service.streams[1].request.priority == -3
    for headers, code in (
        ({"X-Priority": "6"}, "priority_not_allowed"),
        ({"X-SLO-Class": "gold"}, "slo_class_not_allowed"),
    ):
        refused = await complete(site, a, **headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    for bad in ("high", "1.5", "1000", ""):
        assert (await complete(site, a, **{"X-Priority": bad})).status_code == 400, bad


async def test_without_keys_nobody_is_urgent(make_site: MakeSite) -> None:
    site = make_site()
    assert (await complete(site, None, **{"X-Priority": "1"})).status_code == 403
    body = {"model": "tiny", "prompt": "hi", "priority": 99, "tenant": "x", "cache_salt": "y", "slo_class": "gold"}
    body |= {"kv_transfer_params": {"do_remote_prefill": True}, "bootstrap_room": 1, "routing": {"worker": "m0"}}
    assert (await site.client.post("/v1/completions", json=body)).status_code == 200
    (stream,) = site.service.streams
    assert (stream.request.priority, stream.request.tenant, stream.request.cache_salt) == (0, "", "")
    assert stream.request.slo_class == "default"


async def test_pages_of_allowed_origins_may_ask(make_site: MakeSite, access: Access) -> None:
    site = make_site(access=access, cors_origins=("https://a.example",))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = await site.client.options("/v1/completions", headers={"Origin": "https://a.example", **asks})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
    other = await site.client.options("/v1/completions", headers={"Origin": "https://b.example", **asks})
    assert other.status_code == 400
    refused = await complete(site, None, Origin="https://a.example")
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in (await make_site().client.get("/health")).headers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "write [[keys]] tables"),
        ("[[keys]]\nname='a'", "key"),
        ("[[keys]]\nname='a'\nkey='short'", "at least 8"),
        ("[[keys]]\nname='a'\nkey='sk-12345678'\nrpm=3", "rpm"),
        ("[[keys]]\nname='a'\nkey='sk-12345678'\nrequests_per_minute=0", "at least 1"),
        ("[[keys]]\nname='a'\nkey='sk-12345678'\npriority=101", "-100 to 100"),
        ("[[keys]]\nname='a'\nkey='sk-12345678'\n[[keys]]\nname='b'\nkey='sk-12345678'", "same secret"),
        ("[[keys]]\nname='a'\nkey='sk-12345678'\n[[keys]]\nname='a'\nkey='sk-87654321'", "same name"),
    ],
)
def test_a_keys_file_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_access((), str(path))
    assert words in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_a_missing_keys_file() -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load_access((), "/nowhere/keys.toml")


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes must not say where the search ended."""
    import hmac

    keys = [AccessKey(key=f"sk-number-{number}", name=str(number)) for number in range(5)]
    access, compared = Access(keys), 0
    original = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert access.caller({"authorization": "Bearer sk-number-0"}).name == "0"
    assert compared == 5
    with pytest.raises(NotAuthenticated):
        access.caller({"authorization": "Bearer sk-number-9"})
    assert compared == 10
