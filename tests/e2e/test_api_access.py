"""`disagg serve` behind TLS and keys: the operator's side works, clients need a key, and no secret is shown."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.e2e.cluster import FAST_BEATS, SMALL, Front, announced, router

from disagg.router.config import API_KEYS_VARIABLE
from disagg.testing.processes import Serve

MODEL = "tiny-llama"
KEY = "sk-of-the-environment"
FILE_KEY = "sk-of-the-keys-file"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem, key.pem and keys.toml."""
    folder = tmp_path_factory.mktemp("secrets")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"]
    try:
        subprocess.run([*command, *names], check=True, capture_output=True, timeout=60.0)
    except FileNotFoundError:
        pytest.skip("no openssl here: it makes the certificate")
    (folder / "keys.toml").write_text(f'[[keys]]\nname = "file"\nkey = "{FILE_KEY}"\nrequests_per_minute = 1\n')
    return folder


@pytest.fixture(scope="module")
def serve(tiny_llama: Path, folder: Path) -> Iterator[Serve]:
    files = ("--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem")
    arguments = (str(tiny_llama), "--mixed", "1", *SMALL, *FAST_BEATS, *files, "--api-keys-file", f"{folder}/keys.toml")
    with Serve(arguments, environment={API_KEYS_VARIABLE: KEY}) as running:
        yield running


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


def ask(serve: Serve, folder: Path, key: str) -> str:
    http = openai.DefaultHttpxClient(verify=trusting(folder), trust_env=False)
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key=key, max_retries=0, http_client=http) as client:
        answer = client.completions.create(model=MODEL, prompt="the quick brown", max_tokens=4, temperature=0)
    return answer.choices[0].text


def test_the_official_client_with_a_key(serve: Serve, folder: Path) -> None:
    assert serve.url.startswith("https://")
    first = ask(serve, folder, KEY)
    assert ask(serve, folder, FILE_KEY) == first
    with pytest.raises(openai.RateLimitError) as limited:
        ask(serve, folder, FILE_KEY)
    assert int(limited.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.AuthenticationError):
        ask(serve, folder, "sk-nobody-knows")


def test_no_secret_is_shown(serve: Serve, folder: Path) -> None:
    with httpx.Client(base_url=serve.url, verify=trusting(folder), trust_env=False, timeout=30.0) as client:
        assert client.get("/ready").status_code == httpx.codes.OK
        assert client.post("/v1/completions", json={}).status_code == httpx.codes.UNAUTHORIZED
        shown = [client.get(path).text for path in ("/metrics", "/cluster", "/health")]
    shown += [serve.output, *serve.family().values()]
    assert not [text for text in shown if KEY in text or FILE_KEY in text]


def test_files_that_cannot_be_used_end_the_start_with_one_line(tiny_llama: Path, folder: Path) -> None:
    from disagg.testing.processes import MarkedProcess

    cases = (
        (("--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.pem"), "--tls-cert /nowhere.pem"),
        (("--tls-cert", f"{folder}/cert.pem"), "tls_cert and tls_key belong together"),
        (("--api-keys-file", "/nowhere.toml"), "--api-keys-file /nowhere.toml"),
        (("--api-key", "short"), "--api-key"),
    )
    for more, words in cases:
        arguments = ("router", "--model", f"m={tiny_llama}", "--port", "0", "--control-port", "0", *more)
        with MarkedProcess(arguments) as process:
            assert process.wait(60.0) == 2, process.output
            assert words in process.lines[-1]
            assert "Traceback" not in process.output


def test_a_router_at_an_ipv6_address_says_where_it_is(tiny_llama: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with router({"m": tiny_llama}, "--host", "::1") as process:
        where = announced(process).http
        assert where.startswith("[::1]:")
        with Front(f"http://{where}") as front:
            assert front.client.get("/health").status_code == httpx.codes.OK
