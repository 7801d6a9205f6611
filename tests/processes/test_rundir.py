"""Folders of runs: none that lives is swept up, all that are abandoned are, and they lie where nobody else writes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.starting import codefiles, rundir

STRESS = Path(__file__).with_name("rundir_stress.py")
MAKERS, RUNS = 6, 250


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def program(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(STRESS), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def age_empty_folders(base: Path) -> None:
    """One without a lock is left alone while a maker may come to it."""
    for folder in base.iterdir():
        if not os.listdir(folder):
            os.utime(folder, (0, 0))


@pytest.fixture
def full() -> Iterator[None]:
    """Files may have ten bytes: a disk that is full refuses more in the same way, without the file's name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_is_named_with_the_file(base: Path, full: None) -> None:
    run = rundir.RunDir(str(base))
    try:
        with pytest.raises(OSError) as refused:
            run.write("plan.json", b"x" * 100)
        assert refused.value.filename == str(run.path / "plan.json.new")
    finally:
        run.remove()
    with pytest.raises(OSError) as refused:
        codefiles.write({"stages.py": "x" * 100}, base / "code")
    assert refused.value.filename == str(base / "code/stages.py")


@pytest.mark.proves("concurrent-runs")
def test_a_sweep_at_any_step_of_making_a_run_costs_it_nothing(base: Path) -> None:
    output, _ = program("every-step", str(base)).communicate(timeout=60)
    steps = int(output.split()[0])
    assert steps >= 4, "the steps were not seen"
    assert output == f"{steps} steps, lost []\n"


@pytest.mark.proves("concurrent-runs")
def test_runs_that_start_and_sweep_at_the_same_time_leave_each_other_alone(base: Path) -> None:
    makers = [program("make-and-sweep", str(base), str(RUNS)) for _ in range(MAKERS)]
    assert [maker.communicate(timeout=120)[0] for maker in makers] == ["0\n"] * MAKERS
    assert os.listdir(base) == []


@pytest.mark.proves("concurrent-runs")
def test_killed_runs_are_swept_up_wherever_they_were_killed(base: Path) -> None:
    living = program("make", str(base), stdin=subprocess.PIPE)
    assert living.stdout is not None
    kept = Path(living.stdout.readline().strip())
    for pause in range(12):
        maker = program("make-and-sweep", str(base), "100000")
        with pytest.raises(subprocess.TimeoutExpired):
            maker.wait(0.25 + 0.01 * pause)
        maker.send_signal(signal.SIGKILL)
        maker.communicate()
    age_empty_folders(base)
    rundir.sweep(str(base))
    assert list(base.iterdir()) == [kept]
    living.communicate("")


def test_what_a_killed_sweeper_has_left_is_swept_up_by_the_next_one(base: Path) -> None:
    code, step = 9, 0
    with program("die-sweeping", str(base), stdin=subprocess.PIPE) as sweepers:
        assert sweepers.stdin is not None and sweepers.stdout is not None
        while code:
            step += 1
            run = rundir.RunDir(str(base))
            run.write("facts", b"ours")
            (run.path / "code").mkdir()
            (run.path / "code" / "module.py").touch()
            assert run._lock is not None
            os.close(run._lock)  # its owner is killed
            print(step, file=sweepers.stdin, flush=True)
            code = int(sweepers.stdout.readline())
            assert code in (0, 9)
            age_empty_folders(base)
            rundir.sweep(str(base))
            assert os.listdir(base) == [], f"killed before step {step}"
    assert step > 5, "the steps were not seen"


def test_folders_of_other_programs_are_left_alone(base: Path) -> None:
    for name in ("omni-notes", "omni-12345678x", "omni-ABCDEFGH", "other-abcdefgh"):
        (base / name).mkdir()
        (base / name / "lock").touch()
        os.utime(base / name, (0, 0))
    full = base / "omni-abcdefgh"  # our pattern, and no lock: whatever it is, no run made what is in it
    full.mkdir()
    (full / "thesis").touch()
    os.utime(full, (0, 0))
    fresh = base / "omni-freshone"
    fresh.mkdir()
    before = sorted(base.rglob("*"))
    rundir.sweep(str(base))
    assert sorted(base.rglob("*")) == before


@pytest.mark.proves("foreign-folder")
@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        (0o700, None),
        (0o755, None),
        (0o1777, None),
        (0o1770, None),
        (0o775, "its group (mode 0775)"),
        (0o720, "its group (mode 0720)"),
        (0o777, "everybody (mode 0777)"),
        (0o702, "everybody (mode 0702)"),
        (0o2777, "everybody (mode 2777)"),
    ],
)
@pytest.mark.parametrize("below", ["", "inner", "not/made/yet"])
def test_a_folder_on_the_way_that_others_may_write_is_refused_with_its_name_and_the_cure(
    base: Path, mode: int, refused: str | None, below: str
) -> None:
    shared = base / "shared"
    (shared / "inner").mkdir(parents=True)
    shared.chmod(mode)
    if refused is None:
        rundir.check_access(str(shared / below))
        return
    with pytest.raises(ConfigurationError) as caught:
        rundir.check_access(str(shared / below))
    message = str(caught.value)
    assert message.startswith(f"endpoints.basePath: {shared / below}".rstrip("/"))
    assert f"{shared} may be written by {refused}: chmod go-w it" in message


def test_the_folder_of_somebody_else_is_refused_and_roots_is_not() -> None:
    assert rundir.objection(0, 0o40755) is None
    assert rundir.objection(os.geteuid(), 0o40700) is None
    stranger = 12_345
    found = rundir.objection(stranger, 0o40700)
    assert found is not None and found.startswith(f"belongs to user {stranger}")
    assert rundir.objection(stranger, 0o41777) is not None, "the owner of a sticky folder may rename what is in it"


def test_a_link_is_followed_before_the_way_is_looked_at(base: Path) -> None:
    shared = base / "shared"
    (shared / "inner").mkdir(parents=True)
    shared.chmod(0o777)
    link = base / "link"
    link.symlink_to(shared / "inner")
    with pytest.raises(ConfigurationError, match="may be written by everybody"):
        rundir.check_access(str(link))
    shared.chmod(0o755)
    rundir.check_access(str(link))
    run = rundir.RunDir(str(link))
    assert run.path.parent == shared / "inner"
    run.remove()


def test_folders_that_are_made_on_the_way_are_private(base: Path) -> None:
    before = os.umask(0)
    try:
        run = rundir.RunDir(str(base / "one" / "two"))
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (base / "one", base / "one" / "two", run.path)] == [
        "0o700"
    ] * 3
    run.remove()
