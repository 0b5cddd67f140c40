"""Traces as workloads: read as they are, scaled as asked, and every bad row named by its line."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.traces import TraceWork
from disagg.bench.workload import WorkRequest, prompt_ids
from disagg.core.errors import ConfigurationError

MakeFile = Callable[[str, bytes], Path]
MOONCAKE = b"""\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [0, 3]}
"""
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.6805900,9,1"
)
BURST = b"""\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,100,0,100,Conversation log
118,ChatGPT,1087,230,1317,API log
"""


def requests_of(path: Path, format: str, **more: Any) -> list[WorkRequest]:  # noqa: A002
    stream = TraceWork(path=path, format=format, **more).start(random.Random(0))
    requests = []
    while (request := stream.next_request()) is not None:
        requests.append(request)
    return requests


def test_mooncake_chains_become_shared_prefixes(make_file: MakeFile) -> None:
    one, other = requests_of(make_file("m.jsonl", MOONCAKE), "mooncake")
    assert (one.due_s, one.num_prompt_tokens, one.num_output_tokens) == (0.0, 1100, 5)
    assert (other.due_s, other.num_prompt_tokens, other.num_output_tokens) == (1.5, 600, 9)
    ids, other_ids = prompt_ids(one.runs), prompt_ids(other.runs)
    assert ids[:512] == other_ids[:512]
    assert ids[512] != other_ids[512]


def test_lengths_and_rates_are_scaled_and_chains_kept(make_file: MakeFile) -> None:
    one, other = requests_of(make_file("m.jsonl", MOONCAKE), "mooncake", rate_scale=3.0, length_scale=1 / 64)
    assert (one.num_prompt_tokens, one.num_output_tokens, other.due_s) == (17, 1, 0.5)
    assert [run.num_tokens for run in one.runs] == [8, 8, 1]
    assert prompt_ids(one.runs)[:8] == prompt_ids(other.runs)[:8]


@pytest.mark.parametrize("scale", [0.0001, 0.0025, 0.01, 0.3, 0.999, 1.001, 2.5])
def test_no_scale_loses_or_makes_tokens(make_file: MakeFile, scale: float) -> None:
    """Also where a block becomes less than a token or a token and a half; chains still share what they share."""
    rows = "".join(
        f'{{"timestamp": {n}, "input_length": {50_000 - 512 * n - 7}, "output_length": 1, '
        f'"hash_ids": {[*range(97 - n), 200 + n]}}}\n'
        for n in range(3)
    )
    requests = requests_of(make_file("m.jsonl", rows.encode()), "mooncake", length_scale=scale)
    lengths = [max(1, round((50_000 - 512 * n - 7) * scale)) for n in range(3)]
    assert [request.num_prompt_tokens for request in requests] == lengths
    first, second, third = (prompt_ids(request.runs) for request in requests)
    for (one, other), num_blocks in (((first, second), 96), ((second, third), 95)):
        shared = round(num_blocks * 512 * scale)
        assert one[:shared] == other[:shared]


def test_azure_and_burstgpt_rows(make_file: MakeFile) -> None:
    rows = requests_of(make_file("a.csv", AZURE), "azure")
    assert [(r.due_s, r.num_prompt_tokens, r.num_output_tokens) for r in rows] == [(0.0, 374, 44), (4.0, 9, 1)]
    rows = requests_of(make_file("b.csv", BURST), "burstgpt")
    assert [(r.due_s, r.num_prompt_tokens, r.num_output_tokens) for r in rows] == [(5.0, 472, 18), (118.0, 1087, 230)]


def test_later_azure_files_name_their_zone(make_file: MakeFile) -> None:
    stamps = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00")
    lines = "".join(f"{stamp},5,6\n" for stamp in stamps)
    rows = requests_of(make_file("a.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines.encode()), "azure")
    assert [row.due_s for row in rows] == [0.0, pytest.approx(0.99007)]


def test_a_trace_begins_again_with_other_prompts(make_file: MakeFile) -> None:
    rows = requests_of(make_file("m.jsonl", MOONCAKE), "mooncake", num_requests=5)
    assert [row.due_s for row in rows] == [0.0, 1.5, 1.5, 3.0, 3.0]
    assert len({row.runs[0].label for row in rows}) == 3
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]


def test_prompts_and_answers_can_be_cut(make_file: MakeFile) -> None:
    one, _ = requests_of(make_file("m.jsonl", MOONCAKE), "mooncake", max_prompt_tokens=600, max_output_tokens=3)
    assert (one.num_prompt_tokens, one.num_output_tokens, len(one.runs)) == (600, 3, 2)


@pytest.mark.parametrize(
    ("format", "content", "message"),
    [
        ("mooncake", MOONCAKE + b"{\n", r"line 3: "),
        ("mooncake", MOONCAKE + b'{"timestamp": 2000, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
         r"line 3: 1 hash_ids for 600 tokens; 2 of 0 or more are needed"),
        ("mooncake", MOONCAKE + b'{"timestamp": 20, "input_length": 6, "output_length": 1, "hash_ids": [1]}\n',
         r"line 3: its time 0\.02 s is before the 1\.5 s of the one above"),
        ("mooncake", MOONCAKE + b'{"timestamp": 2000, "input_length": 6, "output_length": 0, "hash_ids": [1]}\n',
         r"line 3: 6 prompt and 0 answer tokens"),
        ("azure", AZURE + b"\nyesterday,1,2\n", r"line 4: 'yesterday' is no time"),
        ("azure", AZURE + b"\n2023-11-16 18:15:51.0,many,2\n", r"line 4: 'many' is no number of tokens"),
        ("azure", AZURE + b"\n2023-11-16 18:15:51.0,1\n", r"line 4: 2 fields, the first line names 3"),
        ("azure", BURST, r"line 1: no column TIMESTAMP, ContextTokens"),
        ("burstgpt", BURST.replace(b"118", b"soon"), r"line 4: 'soon' is no number of seconds"),
        ("burstgpt", BURST.replace(b"118", b"inf"), r"line 4: its time is inf s"),
        ("burstgpt", BURST + b"\xff\n", "is not text"),
        ("azure", b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_by_file_and_line(
    make_file: MakeFile,
    format: str,  # noqa: A002
    content: bytes,
    message: str,
) -> None:
    path = make_file("trace.txt", content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        requests_of(path, format)
    assert str(path) in str(caught.value)


def test_what_is_not_there_is_said_at_the_start(make_file: MakeFile) -> None:
    path = make_file("m.jsonl", MOONCAKE)
    with pytest.raises(ConfigurationError, match="'pcap' is not one of mooncake, azure, burstgpt, servegen"):
        requests_of(path, "pcap")
    with pytest.raises(ConfigurationError, match="no trace file"):
        requests_of(path.with_name("gone"), "mooncake")
    with pytest.raises(ConfigurationError, match="must be above 0"):
        requests_of(path, "mooncake", rate_scale=0.0)


TRACES = Path(os.environ.get("DISAGG_SHARED", Path(__file__).parents[3].parent / "shared")) / "traces"


@pytest.mark.parametrize(
    ("name", "format", "num_rows", "mean_prompt"),
    [
        ("mooncake/conversation_trace.jsonl", "mooncake", 12_031, 12_035),
        ("azure2023/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, 1_155),
        ("azure2023/AzureLLMInferenceTrace_code.csv", "azure", 8_819, 2_048),
    ],
)
def test_public_traces_are_read_whole(name: str, format: str, num_rows: int, mean_prompt: int) -> None:  # noqa: A002
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {path}: the public traces are not on this machine")
    rows = requests_of(path, format)
    assert len(rows) == num_rows
    assert sum(row.num_prompt_tokens for row in rows) / num_rows == pytest.approx(mean_prompt, abs=1)
