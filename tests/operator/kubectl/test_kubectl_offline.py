"""``kubectl omni plan | validate | manifests``: the output for a file, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from omnipipeline_operator.kubectl import cli
from tests.cluster_kit import REPOSITORY

HELLO = str(REPOSITORY / "examples" / "hello" / "pipeline.yaml")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def test_the_same_file_gives_the_same_manifests() -> None:
    first, second = (run("manifests", "-f", HELLO, "--image", "stage:1") for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output == second.output


def test_manifests_for_review_hold_no_key_and_no_owner() -> None:
    made = list(yaml.safe_load_all(run("manifests", "-f", HELLO, "--image", "stage:1").output))
    assert {each["kind"] for each in made} == {
        "ConfigMap",
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Deployment",
    }
    assert not any("ownerReferences" in each["metadata"] for each in made)


def test_manifests_with_a_key_hold_everything_that_the_pods_mount() -> None:
    made = list(yaml.safe_load_all(run("manifests", "-f", HELLO, "--image", "stage:1", "--with-key").output))
    live = {(each["kind"], each["metadata"]["name"]) for each in made}
    for deployment in (each for each in made if each["kind"] == "Deployment"):
        for volume in deployment["spec"]["template"]["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in live
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in live


def test_a_namespace_is_taken_from_the_command_line_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(Path(HELLO).read_text().replace("{name: hello}", "{name: hello, namespace: theirs}"))

    def namespaces(*options: str) -> set[str]:
        output = run(*options, "manifests", "-f", str(file), "--image", "stage:1").output
        return {each["metadata"]["namespace"] for each in yaml.safe_load_all(output)}

    assert namespaces() == {"theirs"}
    assert namespaces("-n", "ours") == {"ours"}


def test_every_fault_is_printed_with_its_line_and_the_exit_code_is_1(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(Path(HELLO).read_text().replace("next: [shout]", "next: [shuot]"))
    done = run("validate", "-f", str(file))
    assert done.exit_code == 1
    assert f"{file}:" in done.output and "stages[0].next" in done.output and "shuot" in done.output


def test_a_plan_names_units_and_the_relay_of_each_edge() -> None:
    done = run("plan", "-f", HELLO)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["split", "shout", "stream", "network", "tcp"] in lines
    assert any(line[:1] == ["voice"] and line[-1] == "shout" for line in lines)


def test_a_plan_shows_how_many_coordinators_the_file_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(Path(HELLO).read_text().replace("spec:\n", "spec:\n  coordinator: {replicas: 3}\n"))
    for given, counted in ((HELLO, "2"), (str(file), "3")):
        lines = [line.split() for line in run("plan", "-f", given).output.splitlines()]
        [row] = [line for line in lines if line[:1] == ["coordinator"]]
        assert row[2] == counted


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_a_null_that_sets_nothing_is_warned_of_with_its_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("stages:\n- {name: a, process: a, factory: 'w:m', terminal: true, factory_args: {x: null}}\n")
    done = run(command, "-f", str(file))
    assert done.exit_code == 0, done.output
    assert "warning: line 2: stages[0].factoryArgs.x: null sets nothing here" in done.output


def test_drain_asks_which_pods_before_it_asks_a_cluster() -> None:
    done = run("drain", "hello")
    assert done.exit_code == 2 and "--stage" in done.output
