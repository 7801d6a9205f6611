"""The times of linear layers are measured once; what a file holds beside times is measured again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stage_runtime.engines.autoregressive.kernels import linears, product_times
from stage_runtime.engines.autoregressive.kernels.linears import LinearsBackend
from stage_runtime.engines.autoregressive.kernels.product_times import KeptTimes

FORMS: list[LinearsBackend] = ["plain", "onednn"]
KNOWN = {"plain": [3.0, 3.0, 3.0], "onednn": [1.0, 1.0, 1.0]}
WEIGHT = torch.randn(96, 96)


def file_of(kept: Path) -> Path:
    """The file of `WEIGHT`, which a first measurement has written."""
    linears.known_times(WEIGHT, FORMS, kept)
    [path] = kept.iterdir()
    return path


def test_a_second_process_takes_what_the_first_one_has_measured(tmp_path: Path) -> None:
    path = file_of(tmp_path / "new")
    product_times.write(path, KeptTimes(KNOWN, settled=True))
    assert linears.known_times(WEIGHT.clone(), FORMS, path.parent) == KNOWN


def test_another_shape_dtype_or_choice_of_forms_is_measured(tmp_path: Path) -> None:
    product_times.write(file_of(tmp_path), KeptTimes(KNOWN, settled=True))
    assert linears.known_times(torch.randn(96, 64), FORMS, tmp_path) != KNOWN
    assert linears.known_times(WEIGHT.bfloat16(), FORMS, tmp_path) != KNOWN
    assert (
        linears.known_times(WEIGHT.bfloat16().float(), FORMS, tmp_path) != KNOWN
    )  # its compiled form is half as large
    assert linears.known_times(WEIGHT, ["onednn", "plain"], tmp_path) != KNOWN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"times": {}, "settled": true}',
        *(
            f'{{"times": {times}, "settled": true}}'
            for times in (
                '{"plain": 1}', '{"plain": [1, 2]}', '{"plain": [1, 2, -3]}', '{"plain": [1, 2, 1e999]}',
                '{"other": [1, 2, 3]}', '{"plain": [1, 2, "3"]}',
            )
        ),
    ],
)  # fmt: skip
def test_a_file_that_holds_something_else_is_measured_anew(text: str, tmp_path: Path) -> None:
    path = file_of(tmp_path)
    path.write_text(text)
    assert set(linears.known_times(WEIGHT, FORMS, tmp_path)) == set(FORMS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_times_of_another_user_are_not_read(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    product_times.write(path, KeptTimes(KNOWN, settled=True))
    os.chown(path, 12345, 12345)
    assert linears.known_times(WEIGHT, FORMS, tmp_path) != KNOWN


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert set(linears.known_times(WEIGHT, FORMS, tmp_path / "file" / "below")) == set(FORMS)


def test_a_start_on_a_busy_machine_is_joined_with_the_next_one(tmp_path: Path) -> None:
    """The least time of both counts, and then it is settled."""
    path = file_of(tmp_path)
    least = {"plain": [0.0, 3.0, 3.0], "onednn": [3.0, 0.0, 3.0]}
    product_times.write(path, KeptTimes(least, settled=False))
    found = linears.known_times(WEIGHT, FORMS, tmp_path)
    assert found["plain"][0] == found["onednn"][1] == 0.0
    assert all(0 < one < 3 for one in (*found["plain"][1:], found["onednn"][0], found["onednn"][2]))
    product_times.write(path, KeptTimes({form: [0.0] * 3 for form in FORMS}, settled=False))
    linears.known_times(WEIGHT, FORMS, tmp_path)
    kept = product_times.read(path, FORMS, 3)
    assert kept is not None and kept.settled
