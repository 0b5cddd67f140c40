"""The cluster whose workers die, hang and drain in the middle of answers: two prefill and two decode workers."""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import SMALL, Front

from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import Serve

MODEL = "tiny-llama"
NUM_WORKERS = 4
TIMEOUT_S = 60.0
TRIGGER = "<tool_call>"  # one token of its model
# A few prompt tokens a step: a prompt of 600 takes long enough to be interrupted.
_POOLS = ("--prefill", "2", "--decode", "2", "--local-prefill-tokens", "0", "--chunk-tokens", "4")
_BEATS = ("--beat-interval-s", "1.5", "--drain-timeout-s", "20")
# Deaths are the point here: nobody is given up for dying often.
_DEATHS = ("--max-crashes", "1000", "--max-restart-delay-s", "0.3")


@pytest.fixture(scope="session")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    model = write_tiny_llama(tmp_path_factory.mktemp("served") / MODEL, max_context=4096, words=(TRIGGER,))
    with Serve((str(model), *_POOLS, *_BEATS, *_DEATHS, *SMALL)) as running:
        yield running


@pytest.fixture
def mortals_front(mortals: Serve) -> Iterator[Front]:
    """All of them are alive and idle."""
    mortals.wait_healthy()
    with Front(mortals.url, timeout_s=TIMEOUT_S) as front:
        front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
        yield front
