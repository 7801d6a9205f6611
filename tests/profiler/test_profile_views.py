"""Views of event files: timelines, intervals, hops; each pair on its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import ConfigurationError
from stage_runtime.profiler import build_report, event_files, views
from tests.profiler.event_files import chain, line, write


def test_a_report_without_files_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        build_report(tmp_path)


def test_one_opener_closes_in_each_of_its_pairs(tmp_path: Path) -> None:
    write(
        tmp_path / "events_thinker_1.jsonl",
        line("r", "thinker", "scheduler_prefill_start", 1_000_000),
        line("r", "thinker", "scheduler_first_emit", 3_000_000),
        line("r", "thinker", "stage_first_stream_chunk_sent", 6_000_000),
    )
    found = build_report(tmp_path)["stage_breakdown"]
    assert [(each["stage"], each["open_event"], each["close_event"], each["avg_ms"]) for each in found] == [
        ("thinker", "scheduler_prefill_start", "scheduler_first_emit", 2.0),
        ("thinker", "scheduler_prefill_start", "stage_first_stream_chunk_sent", 5.0),
    ]


def test_concurrent_encoders_of_one_request_are_distinguished_by_modality(tmp_path: Path) -> None:
    write(
        tmp_path / "e.jsonl",
        line("r", "enc", "encoder_start", 0, modality="image"),
        line("r", "enc", "encoder_start", 1_000_000, modality="audio"),
        line("r", "enc", "encoder_end", 5_000_000, modality="image"),
        line("r", "enc", "encoder_end", 2_000_000, modality="audio"),
    )
    [found] = build_report(tmp_path)["stage_breakdown"]
    assert (found["count"], found["p50_ms"], found["max_ms"]) == (2, 1.0, 5.0)


def test_ranks_of_one_stage_are_distinguished(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(
            tmp_path / f"events_thinker_{rank}.jsonl",
            line("", "thinker", "recorder_started", 0, incarnation=f"i{rank}", rank=rank),
            line("r", "thinker", "encoder_start", 1_000_000 * rank),
            line("r", "thinker", "encoder_end", 10_000_000 - 2_000_000 * rank),
        )
    report = build_report(tmp_path)
    assert [(each["stage"], each["max_ms"]) for each in report["stage_breakdown"]] == [
        ("thinker", 10.0),
        ("thinker rank 1", 7.0),
    ]
    assert [each["rank"] for each in report["processes"]] == [0, 1]


def test_spans_of_authors_are_intervals_too(tmp_path: Path) -> None:
    write(tmp_path / "e.jsonl", line("r", "s", "detokenise_start", 0), line("r", "s", "detokenise_end", 4_000_000))
    [found] = build_report(tmp_path)["stage_breakdown"]
    assert (found["open_event"], found["close_event"], found["avg_ms"]) == ("detokenise_start", "detokenise_end", 4.0)


@given(
    requests=st.integers(1, 4),
    depth=st.integers(1, 4),
    chunks=st.integers(0, 4),
    processes=st.integers(1, 5),
    seed=st.integers(),
)
def test_every_hop_is_paired_however_stages_share_processes(
    tmp_path_factory: pytest.TempPathFactory, requests: int, depth: int, chunks: int, processes: int, seed: int
) -> None:
    """N requests over E payload edges and C chunks: N·E + N·C pairs; clocks of processes are set apart."""
    folder = tmp_path_factory.mktemp("run")
    chosen = random.Random(seed)
    stages = [f"s{index}" for index in range(depth)]
    home = {stage: chosen.randrange(processes) for stage in (*stages, "coordinator")}
    offsets = [chosen.randrange(-(10**12), 10**12) for _ in range(processes)]
    files: list[list[dict[str, object]]] = [
        [line("", "s", "recorder_started", 0, incarnation=f"i{index}")] for index in range(processes)
    ]
    for index, offset in enumerate(offsets):  # the coordinator's file has them all, and a worse measurement of each
        for wrong, uncertainty in ((10**9, 5000), (0, 1000)):
            facts = {"incarnation": f"i{index}", "offset_ns": wrong - offset, "uncertainty_ns": uncertainty}
            files[home["coordinator"]].append(line("", "coordinator", "clock_offset", 0, **facts))
    for number in range(requests):
        for stage, event in chain(f"r{number}", stages, chunks, start=10**15):
            files[home[stage]].append({**event, "timestamp_ns": event["timestamp_ns"] + offsets[home[stage]]})
    for index, lines in enumerate(files):
        chosen.shuffle(lines)
        write(folder / f"pod{index}" / "events_s_1.jsonl", *lines)
    report = build_report(folder)
    hops = report["hop_breakdown"]
    assert sum(each["count"] for each in hops if each["kind"] == "payload") == requests * (depth - 1)
    assert sum(each["count"] for each in hops if each["kind"] == "stream") == requests * depth * chunks
    assert report["unpaired_hops"] == {}
    assert {each["avg_ms"] for each in hops if each["kind"] == "stream"} <= {1.0}
    assert report["request_count"] == requests
    assert {each["events"][0]["event_name"] for each in report["timeline"]} == {"request_admission"}
    assert {each["events"][0]["t_rel_ms"] for each in report["timeline"]} == {0.0}


def test_a_lost_half_of_a_hop_is_counted_not_guessed(tmp_path: Path) -> None:
    events = [event for _, event in chain("r", ["a", "b"], 2)]
    dropped = next(each for each in events if each["event_name"] == "stage_stream_chunk_received")
    write(tmp_path / "e.jsonl", *(each for each in events if each is not dropped))
    report = build_report(tmp_path)
    assert report["unpaired_hops"] == {"stream sent, not received": 1}


def test_a_retry_is_paired_with_its_own_attempt(tmp_path: Path) -> None:
    write(
        tmp_path / "e.jsonl",
        line("r", "a", "stage_hop_sent", 0, to_stage="b", attempt=0),  # its receiver died
        line("r", "a", "stage_hop_sent", 9_000_000, to_stage="b", attempt=1),
        line("r", "b", "stage_input_received", 10_000_000, from_stage="a", attempt=1),
    )
    report = build_report(tmp_path)
    [hop] = report["hop_breakdown"]
    assert (hop["count"], hop["avg_ms"]) == (1, 1.0)
    assert report["unpaired_hops"] == {"payload sent, not received": 1}


def test_events_of_authors_belong_to_the_attempt_that_their_process_works_on(tmp_path: Path) -> None:
    """Two attempts at once: the first one's process is cut off from the coordinator, and goes on."""
    first = [
        line("r", "a", "stage_run_start", 0, attempt=1),
        line("r", "a", "scheduler_prefill_start", 1_000_000),
        line("r", "a", "stage_first_stream_chunk_sent", 9_000_000, attempt=1, to_stage="b"),
    ]
    second = [
        line("r", "a", "stage_run_start", 2_000_000, attempt=2),
        line("r", "a", "scheduler_prefill_start", 3_000_000),
        line("r", "a", "stage_first_stream_chunk_sent", 5_000_000, attempt=2, to_stage="b"),
        line("r", "a", "code2wav_first_audio", 10_000_000),
    ]
    write(tmp_path / "1.jsonl", *first)
    write(tmp_path / "2.jsonl", *second)
    found = {
        (each["open_event"], each["close_event"]): (each["p50_ms"], each["max_ms"])
        for each in build_report(tmp_path)["stage_breakdown"]
    }
    assert found == {
        ("scheduler_prefill_start", "code2wav_first_audio"): (7.0, 7.0),
        ("scheduler_prefill_start", "stage_first_stream_chunk_sent"): (2.0, 8.0),
        ("stage_run_start", "code2wav_first_audio"): (8.0, 8.0),
        ("stage_run_start", "stage_first_stream_chunk_sent"): (3.0, 9.0),
    }


def test_an_authors_event_before_any_of_the_runtimes_opens_an_interval(tmp_path: Path) -> None:
    """The run began in the middle of the request."""
    write(
        tmp_path / "e.jsonl",
        line("r", "a", "scheduler_prefill_start", 0),
        line("r", "a", "stage_first_stream_chunk_sent", 2_000_000, attempt=1),
    )
    [found] = build_report(tmp_path)["stage_breakdown"]
    assert (found["open_event"], found["avg_ms"]) == ("scheduler_prefill_start", 2.0)


def test_a_cut_last_line_and_garbage_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "e.jsonl", line("r", "a", "x", 1), tail='[1]\n\xff\n{"request_id": "r", "sta')
    report = build_report(tmp_path)
    assert (report["event_count"], report["unreadable_lines"]) == (1, 3)


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [views.percentile(values, each) for each in (50, 95, 100)] == [50, 95, 100]
    assert views.percentile([7], 50) == 7


def test_the_slowest_requests_come_first(tmp_path: Path) -> None:
    write(
        tmp_path / "e.jsonl",
        *(line(f"r{n}", "a", name, n * at) for n in range(5) for name, at in (("x", 0), ("y", 1000))),
    )
    assert event_files.slowest(event_files.read(tmp_path), 2) == ["r4", "r3"]


def test_chunks_in_a_queue_and_transfers_are_distinguished_whatever_their_order(tmp_path: Path) -> None:
    def queued(name: str, at_ms: int, chunk_id: int) -> dict[str, object]:
        return line("r", "s", name, at_ms * 1_000_000, kind="chunk", from_stage="a", chunk_id=chunk_id, depth=at_ms)

    def relayed(name: str, at_ms: int, transfer: str) -> dict[str, object]:
        return line("r", "s", name, at_ms * 1_000_000, transfer=transfer, to_stage="b", relay="shm", nbytes=7)

    write(
        tmp_path / "e.jsonl",
        queued("stage_queue_enter", 0, 0),
        queued("stage_queue_enter", 1, 1),
        queued("stage_queue_leave", 2, 0),
        queued("stage_queue_leave", 10, 1),
        relayed("relay_put_start", 0, "x"),
        relayed("relay_put_end", 1, "x"),
        relayed("relay_put_start", 2, "y"),
        relayed("relay_put_end", 3, "y"),
        relayed("relay_released", 20, "x"),
        relayed("relay_released", 21, "y"),
    )
    found = {
        (each["open_event"], each["close_event"]): (each["count"], each["p50_ms"], each["max_ms"])
        for each in build_report(tmp_path)["stage_breakdown"]
    }
    assert found == {
        ("stage_queue_enter", "stage_queue_leave"): (2, 2.0, 9.0),
        ("relay_put_start", "relay_put_end"): (2, 1.0, 1.0),
        ("relay_put_start", "relay_released"): (2, 19.0, 20.0),
    }


def test_a_request_ends_with_its_terminal_response_though_a_transfer_is_released_later(tmp_path: Path) -> None:
    write(
        tmp_path / "e.jsonl",
        line("r", "coordinator", "request_admission", 0),
        line("r", "coordinator", "terminal_response", 5_000_000),
        line("r", "s", "relay_released", 9_000_000),
    )
    [request] = build_report(tmp_path)["timeline"]
    assert request["duration_ms"] == 5.0
