"""An application over a fake service, a tiny real tokenizer, and a check that nothing is left behind."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.unit.router.site import MakeSite, Site, Tls

from disagg.channel.keys import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from disagg.cluster.authority import make_keys
from disagg.dispatch.stream import ModelStatus
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.router.access import Access
from disagg.router.app import create_app
from disagg.router.body import BodyLimits
from disagg.router.server import TlsFiles
from disagg.router.text import ModelText
from disagg.router.timing import Timing
from disagg.testing.generation import FakeGenerationService, Script, ScriptFor, ready
from disagg.testing.tokenizer_files import write_tiny_tokenizer

SMALL_BODIES = BodyLimits(1 << 20)
LEAK_TIMEOUT_S = 10.0


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for loopback addresses, and a context that trusts it."""
    folder, host = tmp_path_factory.mktemp("keys") / "of", "127.0.0.1"
    make_keys(folder, (host,), days=2)
    files = TlsFiles(str(folder / host / CERTIFICATE_FILE), str(folder / host / KEY_FILE))
    return Tls(files, ssl.create_default_context(cafile=str(folder / CA_FILE)))


@pytest.fixture(params=["http", "https"])
def either_scheme(request: pytest.FixtureRequest) -> Tls | None:
    """What is needed to serve by one of them; a test that has this runs over both."""
    return request.getfixturevalue("tls") if request.param == "https" else None


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    return write_tiny_tokenizer(tmp_path_factory.mktemp("bare"), chat_template=None)


@pytest.fixture
def text_threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2, thread_name_prefix="text") as pool:
        yield pool
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("text")]


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    """None that does not end by itself: some end in the turn after the one that told of their work."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=LEAK_TIMEOUT_S)
    assert not left, left


@pytest.fixture
async def make_site(
    tokenizer: ModelTokenizer, bare_folder: Path, text_threads: ThreadPoolExecutor
) -> AsyncIterator[MakeSite]:
    sites: list[Site] = []

    def make(
        script_for: ScriptFor = lambda request: Script(),
        statuses: Sequence[ModelStatus] = (ready("tiny"), ready("bare")),
        limits: BodyLimits = SMALL_BODIES,
        access: Access | None = None,
        cors_origins: Sequence[str] = (),
        models: Mapping[str, ModelText] | None = None,
        timing: Timing | None = None,
    ) -> Site:
        service = FakeGenerationService(statuses, script_for)
        models = models or {"tiny": ModelText(tokenizer), "bare": ModelText(load_tokenizer(bare_folder))}
        app = create_app(
            service,
            models,
            text_threads=text_threads,
            limits=limits,
            access=access,
            cors_origins=cors_origins,
            timing=timing,
            clock=lambda: 1_700_000_000.0,
            draw_seed=lambda: 77,
        )
        transport = httpx.ASGITransport(app=app)
        site = Site(service, app, httpx.AsyncClient(transport=transport, base_url="http://test"))
        sites.append(site)
        return site

    yield make
    for site in sites:
        await site.client.aclose()
        site.service.check_invariants()


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site()
