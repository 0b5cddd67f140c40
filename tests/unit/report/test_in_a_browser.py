"""A page drawn by a real browser, in both themes: not empty, and of different colours."""

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import msgspec
import pytest
from tests.unit.bench.rigs import noisy, result

from disagg.bench.comparison import break_even, length_classes
from disagg.bench.html_report import (
    attainment_plot,
    latency_section,
    length_section,
    request_section,
    summary_section,
    trial_of,
    worker_section,
)
from disagg.report.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def pixels(path: Path) -> list[tuple[int, int, int]]:
    """Some of them, of an 8-bit PNG without interlacing: the first of each row and one in its middle."""
    data = path.read_bytes()
    width, height, _, kind = struct.unpack("!IIBB", data[16:26])
    each = {2: 3, 6: 4}[kind]
    at, packed = 8, b""
    while at < len(data):
        size, name = struct.unpack("!I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += 12 + size
    raw, stride = zlib.decompress(packed), width * each
    before, found = bytearray(stride), []
    for row in range(height):
        start = row * (stride + 1)
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _undo(raw[start], line, before, each)
        found += [(line[0], line[1], line[2]), tuple(line[stride // 2 // each * each :][:3])]
        before = line
    return [(r, g, b) for r, g, b in found]


def _undo(method: int, line: bytearray, above: bytearray, each: int) -> None:
    """A row's filter, as PNG has five of them."""
    for place, value in enumerate(line):
        left = line[place - each] if place >= each else 0
        corner = above[place - each] if place >= each else 0
        up = above[place]
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda each_value: abs(guess - each_value))
        line[place] = (value + (0, left, up, (left + up) // 2, nearest)[method]) & 255


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian package chromium)")
@pytest.mark.parametrize(("scheme", "is_dark"), [("1", False), ("0", True)])
def test_a_browser_draws_it_light_and_dark(tmp_path: Path, scheme: str, is_dark: bool) -> None:
    assert CHROMIUM is not None
    busy = {"prefill": 0.4, "decode": 0.9}
    sides = [result("mixed", noisy(0.9, 0.1), {"mixed": 0.8}), result("separate", noisy(0.8, 0.06, seed=2), busy)]
    classes = length_classes(sides[0].records, sides[1].records)
    curve = attainment_plot([(side.label, [trial_of(side)]) for side in sides], 0.9)
    workers = worker_section(sides)
    assert workers is not None
    sections = [
        msgspec.structs.replace(summary_section("Load", sides), plots=(curve,)),
        latency_section("Latency", sides),
        length_section(classes, break_even(classes)),
        request_section(sides),
        workers,
    ]
    source, picture = tmp_path / "page.html", tmp_path / "page.png"
    source.write_text(page("Bench", "by hand", sections, ["who wins"]))
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=360,500"),
        *(f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--screenshot={picture}", source.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    seen = pixels(picture)
    assert len(set(seen)) > 3, "nothing is drawn"
    assert (sum(seen[0]) < 200) == is_dark
