"""The references that a pod template needs before its containers can start, found by name."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator.desired import references

SECURE = {"secretKeyRef": {"name": "token", "key": "k"}}


def named(spec: dict[str, object]) -> list[str]:
    return [str(each) for each in references.required({"spec": {"containers": [], **spec}})]


def test_every_way_to_name_a_config_map_or_a_secret_is_found() -> None:
    container = {
        "name": "stage",
        "envFrom": [{"configMapRef": {"name": "all"}}, {"secretRef": {"name": "hub"}}],
        "env": [
            {"name": "A", "value": "1"},
            {"name": "T", "valueFrom": SECURE},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "some", "key": "k"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    }
    volumes = [
        {"name": "code", "configMap": {"name": "my-code"}},
        {"name": "api-key", "secret": {"secretName": "keys"}},
        {"name": "tls", "secret": {"secretName": "door"}},
        {"name": "own", "secret": {"secretName": "theirs"}},
        {"name": "mixed", "projected": {"sources": [{"secret": {"name": "p1"}}, {"configMap": {"name": "p2"}}]}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    init = {"name": "before", "envFrom": [{"secretRef": {"name": "early"}}]}
    assert named({"containers": [container], "initContainers": [init], "volumes": volumes}) == [
        "ConfigMap all (envFrom[0])",
        "ConfigMap my-code (code.configMapRef)",
        "ConfigMap p2 (volume mixed)",
        "ConfigMap some (env C)",
        "Secret door (coordinator.http.tls.secretName)",
        "Secret early (envFrom[0])",
        "Secret hub (envFrom[1])",
        "Secret keys (coordinator.http.apiKeySecretRef)",
        "Secret p1 (volume mixed)",
        "Secret theirs (volume own)",
        "Secret token (env T)",
    ]


def test_optional_and_generated_references_are_not_required() -> None:
    container = {
        "envFrom": [{"secretRef": {"name": "hub", "optional": True}}],
        "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "t", "key": "k", "optional": True}}}],
    }
    volumes = [
        {"name": "plan", "configMap": {"name": "p-plan"}},
        {"name": "revisions", "configMap": {"name": "p-revisions"}},
        {"name": "control", "secret": {"secretName": "p-control-1"}},
        {"name": "maybe", "secret": {"secretName": "s", "optional": True}},
    ]
    assert named({"containers": [container], "volumes": volumes}) == []


def test_an_empty_name_is_no_reference() -> None:
    assert named({"containers": [{"env": None, "envFrom": None}], "volumes": None, "initContainers": None}) == []
    assert named({"volumes": [{"name": "x", "configMap": None}, {"name": "y", "projected": None}]}) == []


def test_pull_secrets_are_named_apart() -> None:
    template = {"spec": {"containers": [], "imagePullSecrets": [{"name": "registry"}, {}]}}
    assert references.required(template) == []
    assert [str(each) for each in references.pull_secrets(template)] == ["Secret registry (imagePullSecrets)"]


KEYS = ["volumes", "containers", "initContainers", "imagePullSecrets", "env", "envFrom", "secret", "configMap"]
KEYS += ["secretName", "name", "projected", "sources", "valueFrom", "secretRef", "secretKeyRef", "optional"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_whatever_an_author_s_pod_template_holds_is_read(spec: dict[str, Any]) -> None:
    for found in (references.required({"spec": spec}), references.pull_secrets({"spec": spec})):
        assert all(each.name for each in found)
