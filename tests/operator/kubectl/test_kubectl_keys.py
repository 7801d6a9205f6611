"""`kubectl omni rotate-key`: what is asked of the API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnipipeline_operator.kubectl import acting
from omnipipeline_operator.kubectl.access import Kubectl, KubectlError

PINNED = {"omnipipeline.dev/control-secret": "p-control-new"}
ANSWERS = {
    "configmaps": [{"metadata": {"name": "p-revisions", "annotations": PINNED}}, {"metadata": {"name": "p-plan"}}],
    "secrets": [{"metadata": {"name": name}} for name in ("p-control-old", "p-control-new", "p-tls")],
}


def kubectl(folder: Path, spec: dict[str, Any], answers: dict[str, Any] = ANSWERS) -> Kubectl:
    """A program that answers as kubectl does, and writes down what it is asked."""
    (folder / "pipeline").write_text(json.dumps({"spec": spec}))
    for kind, items in answers.items():
        (folder / kind).write_text(json.dumps({"items": items}))
    program = folder / "kubectl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\nfor each in "$@"; do case "$each" in\n'
        f'--patch-file=*) cat "${{each#--patch-file=}}" > {folder}/patch ;; esac; done\n[ "$1" = get ] || exit 0\n'
        f'case "$2" in omnipipelines*) cat {folder}/pipeline ;; *) cat {folder}/"$2" ;; esac\n'
    )
    program.chmod(0o755)
    return Kubectl(program=str(program))


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_one_patch_asks_for_the_key_and_for_the_restart(tmp_path: Path) -> None:
    stamp = acting.rotate_key(kubectl(tmp_path, {}), "p")
    patch = yaml.safe_load((tmp_path / "patch").read_text())
    annotations = {"omnipipeline.dev/key-rotation": stamp}
    assert patch == {"spec": {"restartedAt": stamp}, "metadata": {"annotations": annotations}}


def test_a_pipeline_without_curve_is_refused_by_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(KubectlError, match=r"p has no control key: control\.security\.mode is None"):
        acting.rotate_key(kubectl(tmp_path, {"control": {"security": {"mode": "None"}}}), "p")
    assert not any(line.startswith("patch") for line in asked(tmp_path))


def test_only_the_keys_that_no_new_pod_has_are_deleted(tmp_path: Path) -> None:
    assert acting.delete_old_keys(kubectl(tmp_path, {}), "p") == ["p-control-old"]
    assert asked(tmp_path)[-1].startswith("delete secret p-control-old")


def test_nothing_is_deleted_while_the_present_key_is_unknown(tmp_path: Path) -> None:
    unknown = {**ANSWERS, "configmaps": [{"metadata": {"name": "p-plan"}}]}
    assert acting.delete_old_keys(kubectl(tmp_path, {}, unknown), "p") == []
    assert not any(line.startswith("delete") for line in asked(tmp_path))
