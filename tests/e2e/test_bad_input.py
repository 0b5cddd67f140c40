"""What cannot work is refused in one plain line or one plain answer, with the numbers, and leaves nothing."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.cluster import Front, completion
from tests.parity.tiny_models import TINY_CONTEXT

from disagg.testing.processes import MarkedProcess, Serve
from disagg.testing.tokenizer_files import write_tiny_tokenizer

END_TIMEOUT_S = 60.0
NUM_BLOCKS = 8
NUM_POOL_TOKENS = 16 * NUM_BLOCKS
MODEL = "tiny-llama"
pytestmark = pytest.mark.timeout(300)


def missing_file(folder: Path) -> tuple[Path, str]:
    return folder / "nothing.gguf", "no model at .*nothing.gguf"


def not_a_model(folder: Path) -> tuple[Path, str]:
    path = folder / "letter.gguf"
    path.write_text("Dear all, this is a letter.")
    return path, "letter.gguf"


def empty_folder(folder: Path) -> tuple[Path, str]:
    path = folder / "empty"
    path.mkdir()
    return path, "config.json"


def unknown_architecture(folder: Path) -> tuple[Path, str]:
    path = folder / "strange"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["StrangeForCausalLM"], "model_type": "strange"}))
    write_tiny_tokenizer(path)
    return path, "StrangeForCausalLM"


def test_serve_ends_with_the_reason_why_no_worker_can_run_a_model(tmp_path: Path) -> None:
    """Only a worker knows: models that are not native may be run by a library."""
    path, words = unknown_architecture(tmp_path)
    with MarkedProcess(("serve", str(path), "--mixed", "1", "--port", "0")) as process:
        assert process.wait(END_TIMEOUT_S) == 2, process.output
        process.check_nothing_left()
        assert process.lines[-1].startswith("disagg: mixed-0: ")
        assert words in process.lines[-1]
        assert "Traceback" not in process.output


@pytest.mark.parametrize("make", [missing_file, not_a_model, empty_folder])
def test_serve_says_in_one_line_what_is_wrong_with_a_model(
    tmp_path: Path, make: Callable[[Path], tuple[Path, str]]
) -> None:
    path, words = make(tmp_path)
    with MarkedProcess(("serve", str(path), "--mixed", "1", "--port", "0")) as process:
        assert process.wait(END_TIMEOUT_S) == 2, process.output
        check_one_line(process, words)


@pytest.mark.parametrize("make", [not_a_model, empty_folder, unknown_architecture])
@pytest.mark.parametrize(
    "arguments", [("worker", "--role", "decode"), ("router", "--port", "0", "--model")], ids=["worker", "router"]
)
def test_worker_and_router_say_it_alike(
    tmp_path: Path, arguments: tuple[str, ...], make: Callable[[Path], tuple[Path, str]]
) -> None:
    path, words = make(tmp_path)
    if make is unknown_architecture and arguments[0] == "router":
        pytest.skip("a router needs the tokenizer only: whether weights can be run is for the workers to say")
    last = f"name={path}" if arguments[0] == "router" else str(path)
    with MarkedProcess((*arguments, last)) as process:
        assert process.wait(END_TIMEOUT_S) == 2, process.output
        check_one_line(process, words)


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_a_port_in_use_is_named(tiny_llama: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--control-port": "0", flag: str(port)}
        given = [text for pair in ports.items() for text in pair]
        with MarkedProcess(("serve", str(tiny_llama), "--mixed", "1", *given)) as process:
            assert process.wait(END_TIMEOUT_S) == 2, process.output
            check_one_line(process, f"127.0.0.1:{port} .*{flag}")


def check_one_line(process: MarkedProcess, words: str) -> None:
    process.check_nothing_left()
    assert len(process.lines) == 1, process.output
    assert process.wait_line(words, 1.0).startswith("disagg: ")
    assert "Traceback" not in process.output


@pytest.fixture(scope="module")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    """Its KV pool is too small for what the context would allow."""
    arguments = ("--mixed", "1", "--num-blocks", str(NUM_BLOCKS), "--num-threads", "1", "--max-body-bytes", "64K")
    with Serve((str(tiny_llama), *arguments)) as running:
        yield running


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    with Front(serve.url) as front:
        yield front


def error_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert isinstance(message, str)
    return message


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(front: Front) -> None:
    message = error_of(front.post(completion(MODEL, [5] * 801, 1)), 400)
    assert "801" in message
    assert str(TINY_CONTEXT) in message
    message = error_of(front.post(completion(MODEL, [5] * 100, TINY_CONTEXT)), 400)
    assert "100" in message
    assert str(100 + TINY_CONTEXT) in message


def test_a_request_larger_than_the_kv_pool_is_refused_with_the_numbers(front: Front) -> None:
    message = error_of(front.post(completion(MODEL, [5] * 100, 100)), 400)
    assert "199" in message
    assert str(NUM_POOL_TOKENS) in message
    assert "--kv-memory" in message
    # One token less than the pool holds is served, and again: it all came back.
    for _ in range(2):
        assert len(front.complete(MODEL, [5] * 100, NUM_POOL_TOKENS - 99)[0].tokens) == NUM_POOL_TOKENS - 99
    front.wait_idle(1)


def test_an_unknown_model_is_404(front: Front) -> None:
    assert "'gpt-5' is not served here; served: tiny-llama" in error_of(front.post(completion("gpt-5", "x", 1)), 404)
    assert "nowhere" in error_of(front.client.get("/v1/models/nowhere"), 404)


@pytest.mark.parametrize("body", [b"", b"{", b"not json", b"\xff\xfe", b'"text"', b"[]", b"17", b"null"])
def test_a_body_that_is_no_object_is_400(front: Front, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert error_of(front.client.post(path, content=body), 400)


def test_a_body_too_large_is_413(front: Front) -> None:
    assert str(64 << 10) in error_of(front.post(completion(MODEL, "x" * (65 << 10), 1)), 413)


def test_token_ids_out_of_the_vocabulary_are_400(front: Front) -> None:
    for bad in (-1, 313, 10**9):
        assert str(bad) in error_of(front.post(completion(MODEL, [5, bad], 1)), 400)
    assert error_of(front.post(completion(MODEL, [], 1)), 400)


def test_nothing_of_all_this_stays(front: Front) -> None:
    front.wait_idle(1)
    assert len(front.complete(MODEL, "hello", 3)[0].tokens) == 3
