"""`disagg bench compare` with clusters of real processes: what it learns of them, and that they are gone afterwards."""

import re
from pathlib import Path

import pytest
from tests.e2e.cluster import ANSWER_TIMEOUT_S, SMALL

from disagg.bench.record import Lapse, read_records
from disagg.cli.bench_compare import run_compare
from disagg.cli.bench_options import CompareOptions, ReportOptions
from disagg.testing.model_files import write_tiny_llama

NUM_REQUESTS, NUM_ROUNDS = 8, 2
SCENARIO = """
about = "a few short prompts"
rate_per_s = 8.0
num_requests = 8
slo = { ttft_s = 50.0, tpot_s = 50.0 }
prompt = { mean = 40, spread = 20, least = 10, most = 80 }
output = { mean = 6 }
"""


@pytest.mark.slow  # eight processes
def test_real_workers_of_both_kinds_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, scenario = write_tiny_llama(tmp_path / "tiny"), tmp_path / "few.toml"
    page, records = tmp_path / "page.html", tmp_path / "records.jsonl"
    scenario.write_text(SCENARIO)
    asked = CompareOptions(
        model=str(model),
        prefill=1,
        decode=1,
        mixes=(str(scenario),),
        rates=(1.0,),
        requests=NUM_REQUESTS,
        rounds=NUM_ROUNDS,
        seed=1,
        timeout_s=ANSWER_TIMEOUT_S,
        serve_flags=(*SMALL, "--local-prefill-tokens", "0"),
    )
    run_compare(asked, ReportOptions(html=page, records=records))
    said = capsys.readouterr().out
    found = list(read_records(records.read_bytes().splitlines()))
    assert len(found) == 2 * NUM_ROUNDS * NUM_REQUESTS
    # Random weights may write what is no text.
    assert {record.lapse for record in found} <= {None, Lapse.EMPTY}, said
    assert sum(record.is_whole for record in found) >= len(found) / 2
    for measure in ("TTFT", "first gap"):
        counts = re.findall(
            rf"^{measure} by stage: .* \((\d+) requests, as the server measured them\)$", said, re.MULTILINE
        )
        assert [int(count) for count in counts] == [NUM_ROUNDS * NUM_REQUESTS] * 2, said
    sentence = said.strip().split("\n")[-1]
    assert re.search(r"what limits separate workers: (none|prefill|decode|hand-off)\b.*% of TTFT is ", sentence)
    text = page.read_text()
    for title in ("Busy workers, separate", "Stages of requests, separate", "Stages of requests, mixed"):
        assert f'aria-label="{title}"' in text
    assert re.search(r"<td>separate prefill</td><td>\d+ %</td><td>[\d.]+</td><td>\d+ %</td>", text), "hidden bytes"
