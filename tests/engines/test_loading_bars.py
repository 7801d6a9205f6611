"""Bars that libraries draw while a stage loads are reported, with their share, and write nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tqdm.auto import tqdm

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.making import bars
from stage_runtime.stage.context import RankContext
from tests.cluster.hub import COMMIT, MODEL, serving
from tests.engines.generation_kit import tiny_model

Reported = list[tuple[str, float, float, str]]


def collecting() -> tuple[Reported, Any]:
    found: Reported = []
    return found, lambda *shown: found.append(shown)


def test_a_bar_is_reported_to_its_end_and_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    found, report = collecting()
    with bars.reported(report):
        for _each in tqdm(range(3), desc="weights", mininterval=0):
            pass
    assert found == [("weights", float(done), 3.0, "it") for done in range(4)]
    assert capfd.readouterr() == ("", "")


def test_a_bar_outside_of_a_load_is_drawn_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    found, report = collecting()
    with bars.reported(report):
        pass
    for _each in tqdm(range(3), desc="weights"):
        pass
    assert found == []
    assert "weights: 100%" in capfd.readouterr().err


def test_a_bar_that_shows_itself_on_terminals_only_is_reported_and_a_disabled_one_is_not() -> None:
    found, report = collecting()
    with bars.reported(report):
        for _each in tqdm(range(1), desc="on terminals", disable=None, mininterval=0):
            pass
        for _each in tqdm(range(1), desc="never", disable=True):
            pass
    assert {one[0] for one in found} == {"on terminals"}


def test_bytes_go_before_files_and_an_outer_loop_before_an_inner_one() -> None:
    found, report = collecting()
    with bars.reported(report):
        with tqdm(total=2, desc="files", mininterval=0) as files, tqdm(total=9, desc="bytes", unit="B") as nbytes:
            files.update()
            nbytes.update(9)
        for _outer in tqdm(range(2), desc="outer", mininterval=0):
            for _inner in tqdm(range(2), desc="inner", mininterval=0):
                pass
    assert found == [
        ("files", 0.0, 2.0, "it"),
        ("bytes", 0.0, 9.0, "B"),
        ("bytes", 9.0, 9.0, "B"),
        ("files", 1.0, 2.0, "it"),
        *(("outer", float(done), 2.0, "it") for done in range(3)),
    ]


def test_less_than_a_hundredth_is_not_reported() -> None:
    found, report = collecting()
    with bars.reported(report), tqdm(total=10_000, desc="w", mininterval=0, miniters=1) as bar:
        for _each in range(10_000):
            bar.update()
    assert [one[1] for one in found] == [100.0 * each for each in range(101)]


def test_bars_of_a_thread_belong_to_the_one_load_and_to_none_of_two() -> None:
    def draw() -> None:
        for _each in tqdm(range(1), desc="in a thread", mininterval=0, file=sys.stderr, disable=None):
            pass

    def in_a_thread() -> None:
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    alone, report = collecting()
    with bars.reported(report):
        in_a_thread()
    assert {one[0] for one in alone} == {"in a thread"}
    second, other = collecting()
    begun, over = threading.Event(), threading.Event()

    def load() -> None:
        with bars.reported(other):
            begun.set()
            over.wait()

    loading = threading.Thread(target=load)
    loading.start()
    begun.wait()
    first, report = collecting()
    with bars.reported(report):
        in_a_thread()
    over.set()
    loading.join()
    assert (first, second) == ([], [])


def test_tqdm_that_a_factory_imports_is_found_and_imported_by_nobody_else() -> None:
    program = (
        "import sys\n"
        "from stage_runtime.engines.making import bars\n"
        "with bars.reported(lambda *shown: print(*shown)):\n"
        "    assert 'tqdm' not in sys.modules\n"
        "    from tqdm import tqdm\n"
        "    list(tqdm('ab', desc='late', mininterval=0))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["late 0.0 2.0 it", "late 1.0 2.0 it", "late 2.0 2.0 it"]
    assert ran.stderr == ""


def test_weights_that_transformers_loads_are_reported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model("llama").save_pretrained(tmp_path)
    found, report = collecting()
    with bars.reported(report):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found and found[-1][0] == "Loading weights"
    assert found[-1][1] == found[-1][2] > 1


def test_a_download_from_a_hub_is_reported_in_bytes(tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    found, report = collecting()
    with serving("127.0.0.1") as hub, bars.reported(report):
        hub.has_model = True
        hub.files["weights.txt"] = bytes(40 << 20)
        hf_hub_download(MODEL, "weights.txt", endpoint=hub.url, cache_dir=tmp_path, revision=COMMIT)
    assert found[-1] == ("weights.txt", float(40 << 20), float(40 << 20), "B")


def test_a_bar_of_odd_values_is_left_out_and_its_loop_goes_on() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    found, report = collecting()
    with bars.reported(report):
        for odd in (Unprintable(), "\udc80half", "x" * 100_000, 7):
            bar = tqdm(total=3, mininterval=0)
            bar.desc = odd
            bar.refresh()
            bar.close()
        for total in (float("nan"), -1, "many"):
            bar = tqdm(total=3, desc="odd", mininterval=0)
            bar.total = total
            bar.refresh()
        for count in (float("inf"), -5, 10**400, None):
            bar.n, bar.total = count, 3
            bar.refresh()
    assert all(len(message) <= 201 and message.isprintable() for message, *_rest in found)
    assert all(0 <= number < float("inf") for _message, done, total, _unit in found for number in (done, total))
    assert {"7", "odd"} <= {message for message, *_rest in found}


def test_a_stage_that_reports_what_is_no_progress_is_told_where() -> None:
    said: list[tuple[object, ...]] = []
    context = RankContext(
        StagePlan(name="s", group="g", factory="m:f"),
        model_path=None,
        model_revision=None,
        allocate=lambda shape, dtype: None,
        progress=lambda *event: said.append(event),
        emit=lambda *event: None,
    )
    context.progress("half \udc80", 1, 2, "B")
    assert said == [("s", "half ?", 1.0, 2.0, "B")]
    odd: list[tuple[dict[str, Any], str]] = [
        ({"message": 7}, r"message=7\): a text"),
        ({"message": "m", "unit": None}, r"unit=None\): a text"),
        ({"message": "m", "done": float("nan")}, r"done=nan\): a finite number"),
        ({"message": "m", "total": -1}, r"total=-1\): a finite number"),
        ({"message": "m", "total": 10**400}, r"total=an integer of 1329 bits\): a finite number"),
        ({"message": "m", "done": "1"}, r"done='1'\): a finite number"),
    ]
    for given, problem in odd:
        with pytest.raises((TypeError, ValueError), match=problem):
            context.progress(**given)
    assert len(said) == 1
