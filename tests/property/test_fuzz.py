"""Whatever bytes come, each decoder behind a socket takes them or refuses them; a long run is `make fuzz`."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.testing import fuzz

TARGETS: dict[str, Callable[[bytes], bool]] = {
    "message": fuzz.decode_message,
    "items": fuzz.decode_items,
    "small": fuzz.decode_small,
    "local": fuzz.decode_local,
    "frames": lambda data: asyncio.run(fuzz.read_frames(data)),
}


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=examples(200), deadline=None)
@given(data=st.binary(max_size=400))
@example(data=b"\x91" * 5000)  # nested deeper than any decoder goes
@example(data=b"\xdd\xff\xff\xff\xff")  # an array of 4 billion elements
@example(data=b"\xff\xff\xff\xff" + bytes(8))  # a frame of 4 GiB
@example(data=b"\x92\xa8farewell" + b"\x91" * 5000)  # a field that is not known, nested as deep
def test_noise_is_taken_or_refused(target: str, data: bytes) -> None:
    TARGETS[target](data)


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damaged_input_is_taken_or_refused(seed: int) -> None:
    outcomes, _ = asyncio.run(fuzz.run(300, seed))
    assert sum(each.num_accepted + each.num_refused for each in outcomes.values()) == 300


def test_good_input_is_taken() -> None:
    """Otherwise the runs above would damage what is refused anyway."""
    fuzzer = fuzz.Fuzzer(0)
    assert all(fuzz.decode_message(each) for each in fuzzer.messages)
    assert all(fuzz.decode_items(each) for each in fuzzer.items)
    assert all(fuzz.decode_small(each) for each in fuzzer.small)
    assert all(fuzz.decode_local(each) for each in fuzzer.locals)
    assert all(asyncio.run(fuzz.read_frames(each)) for each in fuzzer.frames)


def test_a_decoder_that_crashes_is_found_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes) -> bool:
        return data[3] > 0

    monkeypatch.setattr(fuzz, "decode_items", careless)
    with pytest.raises(IndexError) as crash:
        asyncio.run(fuzz.run(2000, 1))
    assert any("seed 1" in note for note in crash.value.__notes__)
