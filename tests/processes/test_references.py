"""Secrets and ConfigMaps of the pipeline's own file: what they answer, and what is said of those that are not there."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from omnipipeline_spec import loading
from stage_runtime.errors import ConfigurationError
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.one_machine.preparing import references

HEAD = """\
apiVersion: omnipipeline.dev/v1alpha1
kind: OmniPipeline
metadata: {name: p, namespace: models}
spec:
  stages: [{name: a, process: p, factory: "m:f", terminal: true}]
"""


def secret(name: str, *, namespace: str | None = None, **data: str) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded}


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def resolved(spec: str, *beside: Any, environ: dict[str, str] | None = None) -> references.Resolved:
    loaded = loading.loads(HEAD + spec)
    return references.resolve(loaded.spec, beside, environ or {}, namespace="models")


def test_variables_come_in_the_order_of_a_container_and_see_those_before_them() -> None:
    spec = """\
  envFrom:
  - {prefix: HUB_, secretRef: {name: hub}}
  - {configMapRef: {name: common}}
  env:
  - {name: HOST, value: here}
  - {name: URL, value: "http://$(HOST)/$(HUB_token)?$(LATER)&$$(HOST)"}
  - {name: LATER, value: x}
  - {name: LEVEL, value: "2"}
  - {name: EMPTY}
  - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
  - {name: MODE, valueFrom: {configMapKeyRef: {name: common, key: mode}}}
  - {name: GONE, valueFrom: {configMapKeyRef: {name: common, key: no-such, optional: true}}}
"""
    found = resolved(spec, secret("hub", token="t$(HOST)"), config_map("common", mode="fast", LEVEL="1"))
    assert found.environment == {
        "HUB_token": "t$(HOST)",
        "mode": "fast",
        "LEVEL": "2",
        "HOST": "here",
        "URL": "http://here/t$(HOST)?$(LATER)&$(HOST)",
        "LATER": "x",
        "EMPTY": "",
        "TOKEN": "t$(HOST)",
        "MODE": "fast",
    }
    assert found.notices == ()


def test_what_one_machine_has_not_is_named_with_the_cure_and_where_it_comes_from_instead() -> None:
    spec = """\
  code: {configMapRef: {name: files}}
  envFrom: [{secretRef: {name: hub}}]
  env:
  - {name: TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
  - {name: HERE, valueFrom: {configMapKeyRef: {name: common, key: here}}}
  - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: SIZE, valueFrom: {resourceFieldRef: {resource: limits.memory}}}
"""
    found = resolved(spec, secret("hub", namespace="elsewhere", token="x"), environ={"HERE": "1"})
    assert found.environment == {}
    absent = "Secret 'hub' is missing here: put it into the pipeline's file"
    assert found.notices == (
        f"envFrom[0]: {absent}, or set its variables in this shell",
        f"env.TOKEN: {absent}, or set the variable in this shell",
        "env.HERE: ConfigMap 'common' is missing here: put it into the pipeline's file, or set the variable in this "
        "shell; the one that is set here is taken",
        "env.IP: one machine has no pod whose fields it could take: set the variable in this shell",
        "env.SIZE: one machine has no pod whose fields it could take: set the variable in this shell",
        "code.configMapRef: ConfigMap 'files' is missing here: put it into the pipeline's file, "
        "or its files into the pipeline's folder",
    )


@pytest.mark.parametrize(
    ("spec", "beside", "problem"),
    [
        (
            "  env: [{name: T, valueFrom: {secretKeyRef: {name: hub, key: tokn}}}]\n",
            secret("hub", token="x"),
            "env.T: Secret 'hub' has no key 'tokn'; it has token",
        ),
        ("", secret("hub") | {"data": {"token": "not base64!"}}, "Secret 'hub': data.token is not base64"),
        ("", secret("hub") | {"data": {"token": "/w=="}}, "Secret 'hub': data.token is not UTF-8 text"),
        ("", secret("hub") | {"stringData": {"token": 5}}, "Secret 'hub': stringData is not a map of strings"),
        ("", config_map("c") | {"data": ["x"]}, "ConfigMap 'c': data is not a map of strings"),
        (
            "  env: [{name: T, valueFrom: {secretKeyRef: {name: hub, key: token}}}]\n",
            secret("hub", token="a\0b"),
            "env.'T': no environment can hold NUL bytes",
        ),
        (
            "  code: {configMapRef: {name: c}}\n",
            config_map("c", **{"../up.py": "x"}),
            "code.configMapRef: ConfigMap 'c': '../up.py' is not a file name",
        ),
        (
            "  coordinator: {http: {apiKeySecretRef: {name: k, key: key}}}\n",
            secret("k", key=" \n"),
            "Secret 'k': expected a key",
        ),
        (
            "  coordinator: {http: {apiKeySecretRef: {name: k, key: key}}}\n",
            secret("k", key="two words"),
            "Secret 'k': a key is a line of printable ASCII without spaces",
        ),
    ],
)
def test_an_object_that_cannot_answer_is_refused_by_name(spec: str, beside: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolved(spec, beside)
    assert problem in str(caught.value)


KEYED = HEAD + "  coordinator: {http: {apiKeySecretRef: {name: k, key: key}}}\n"
SECRET = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: k}\nstringData: {key: from-secret}\n"


def keyed(tmp_path: Path, text: str, **options: Any) -> LocalPipeline:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    return LocalPipeline(file, options=LocalOptions(port=0, **options), environ={})


@pytest.mark.proves("no-key")
def test_without_a_key_only_this_machine_reaches_the_pipeline_unless_no_auth_is_given(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        for text in (HEAD, KEYED):
            with pytest.raises(ConfigurationError, match=r"no API key is set: .*--api-key-file.*--no-auth"):
                keyed(tmp_path, text, host=host).check()
    for open_to_all in (
        keyed(tmp_path, HEAD, host="0.0.0.0", no_auth=True),
        keyed(tmp_path, HEAD, host="0.0.0.0", api_key_file=key),
        keyed(tmp_path, KEYED + SECRET, host="0.0.0.0"),
        keyed(tmp_path, KEYED, host="localhost"),
        keyed(tmp_path, KEYED, host="127.0.0.3"),
        keyed(tmp_path, KEYED, host="::1"),
    ):
        open_to_all.check()


def test_a_key_that_the_spec_asks_for_and_nobody_need_send_is_named(tmp_path: Path) -> None:
    assert keyed(tmp_path, KEYED + SECRET).notices == ()
    assert keyed(tmp_path, KEYED).notices == (
        "coordinator.http.apiKeySecretRef: no key is required, Secret 'k' is missing here: "
        "put it into the pipeline's file, or use --api-key-file",
    )
    notices = keyed(tmp_path, KEYED + SECRET, no_auth=True).notices
    assert notices == ("coordinator.http.apiKeySecretRef: no key is required, --no-auth",)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\n \n"), "expected a key"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't decode"),
        (lambda path: path.write_bytes(b"k" * 5000), "holds more than 4096 bytes"),
        (lambda path: path.symlink_to("/dev/zero"), "holds more than 4096 bytes"),
        (lambda path: path.write_bytes(b"one\ntwo words\n"), "a key is a line"),
    ],
)
def test_a_file_of_a_key_that_holds_none_is_refused_with_its_name(tmp_path: Path, make: Any, problem: str) -> None:
    path = tmp_path / "key"
    make(path)
    with pytest.raises(ConfigurationError, match=f"--api-key-file {path}") as caught:
        keyed(tmp_path, HEAD, api_key_file=path)
    assert problem in str(caught.value)


def test_variables_that_are_not_free_to_set_do_not_come_in_by_a_whole_secret_either(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    brought = SECRET.replace("{key: from-secret}", '{OMNI_PLAN: "/x", CUDA_VISIBLE_DEVICES: "7", HF_TOKEN: "t"}')
    file.write_text(HEAD + "  envFrom: [{secretRef: {name: k}}]\n" + brought)
    assert LocalPipeline(file, environ={}).notices == (
        "envFrom: OMNI_PLAN is left out: it is set by the operator itself",
        "envFrom: CUDA_VISIBLE_DEVICES is left out: it is derived from the stages' gpu",
    )
