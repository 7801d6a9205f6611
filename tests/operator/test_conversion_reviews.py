"""The conversion webhook: every review is answered, over TLS, by a certificate that is renewed without a gap."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_operator import cli, errors, settings
from omnipipeline_operator.conversion import certificates, publishing, reviews, serving, withdrawing
from omnipipeline_operator.conversion.certificates import Held
from omnipipeline_operator.conversion.publishing import Publisher
from omnipipeline_operator.conversion.serving import Server
from omnipipeline_operator.kinds import CRD, DEFINITION, SECRET
from omnipipeline_operator.settings import ConversionSettings
from omnipipeline_spec.conversion.versions import Spoke, Versions
from tests.contract.next_version import HUB, NAME, VERSIONS
from tests.operator.fake_api_server import ApiServer
from tests.patience import patience
from tests.ports import free_port

ALPHA, BETA = f"omnipipeline.dev/{HUB}", f"omnipipeline.dev/{NAME}"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pipeline(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"omnipipeline.dev/{HUB}",
        "kind": "OmniPipeline",
        "metadata": {"name": "duo", "namespace": "team"},
        "spec": spec,
    }


def review(*objects: Any, **request: Any) -> dict[str, Any]:
    asked = {"uid": "u", "desiredAPIVersion": f"omnipipeline.dev/{NAME}", "objects": list(objects)}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": {**asked, **request}}


def answered(asked: Any, versions: Versions = VERSIONS) -> Any:
    return json.loads(reviews.answer(json.dumps(asked).encode(), versions))


def test_a_review_is_answered_with_its_objects_in_their_order() -> None:
    made = answered(review(pipeline(modelPath="a"), pipeline(modelPath="b")))
    there = {**pipeline(), "apiVersion": f"omnipipeline.dev/{NAME}"}
    assert made == {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "ConversionReview",
        "response": {
            "uid": "u",
            "result": {"status": "Success"},
            "convertedObjects": [{**there, "spec": {"model": "a"}}, {**there, "spec": {"model": "b"}}],
        },
    }


@pytest.mark.parametrize(
    "asked, message",
    [
        (review(pipeline(), 5), "request.objects[1]: expected an object, got 5"),
        (review({**pipeline(), "spec": []}), "request.objects[0].spec: expected an object, got [] (of team/duo)"),
        (
            review({**pipeline(), "apiVersion": "omnipipeline.dev/v0"}),
            "request.objects[0].apiVersion: expected omnipipeline.dev/ and one of v1alpha1, v1beta1, "
            "got 'omnipipeline.dev/v0' (of team/duo)",
        ),
        (
            review({**pipeline(stages=[{"parallelism": 5}]), "apiVersion": BETA}, desiredAPIVersion=ALPHA),
            "request.objects[0]: AttributeError: 'int' object has no attribute 'get' (of team/duo)",
        ),
        (review(objects=None), "request.objects: expected a list, got None"),
        (review(desiredAPIVersion="v1"), "request.desiredAPIVersion: expected a version of omnipipeline.dev, got 'v1'"),
        (
            review(pipeline(), desiredAPIVersion="omnipipeline.dev/v9"),
            "request.objects[0]: version 'v9' is not among v1alpha1, v1beta1 (of team/duo)",
        ),
        ({**review(), "apiVersion": "v1"}, "apiVersion: expected apiextensions.k8s.io/v1, got 'v1'"),
    ],
)
def test_a_hostile_review_fails_and_names_the_place(asked: Any, message: str) -> None:
    result = {"status": "Failed", "message": message}
    assert answered(asked)["response"] == {"uid": "u", "convertedObjects": [], "result": result}


@pytest.mark.parametrize("body", [b"", b"{", b"5", b"{}", b'{"request": {"uid": 5}}', b"[" * 100_000, b'"\xff"'])
def test_what_is_not_a_review_is_told_so(body: bytes) -> None:
    with pytest.raises(reviews.NotAReview):
        reviews.answer(body, VERSIONS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(values, st.sampled_from(["apiVersion", "kind", "metadata", "spec", "status"]), st.booleans())
def test_any_review_is_answered(value: Any, field: str, whole: bool) -> None:
    thing = value if whole else {**pipeline(), field: value}
    logging.disable(logging.CRITICAL)  # hundreds of refusals, a line each
    try:
        made = answered(review(thing))["response"]
    finally:
        logging.disable(logging.NOTSET)
    assert (made["uid"], made["result"]["status"] in ("Success", "Failed")) == ("u", True)


def test_a_step_that_raises_fails_its_review_alone() -> None:
    def broken(document: Any) -> Any:
        raise KeyError("x" * 5000)

    table = Versions(spokes={NAME: Spoke(to_hub=broken, from_hub=broken)})
    failed = answered(review(pipeline()), table)["response"]["result"]
    assert failed["status"] == "Failed"
    assert failed["message"].startswith("request.objects[0]: KeyError")
    assert len(failed["message"]) <= 1001


# --- certificates -------------------------------------------------------------------------------------------------


def leaf(held: Held) -> x509.Certificate:
    return x509.load_pem_x509_certificate(held.certificate)


def trusted(held: Held) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(held.authorities)


def test_a_certificate_is_kept_until_a_third_of_its_life_is_left() -> None:
    first = certificates.renewed(None, "one.svc", NOW)
    assert certificates.renewed(first, "one.svc", NOW + timedelta(days=59)) is first
    second = certificates.renewed(first, "one.svc", NOW + timedelta(days=61))
    assert (second.authorities, second.authority_key) == (first.authorities, first.authority_key)
    assert leaf(second).not_valid_after_utc == NOW + timedelta(days=61 + 90)


def test_a_new_authority_is_trusted_before_its_first_certificate_is_shown() -> None:
    held, now, seen = certificates.renewed(None, "one.svc", NOW), NOW, set[bytes]()
    bundles = [held.authorities]
    for _ in range(12 * 365 * 2):  # twelve years, in steps of half a day and then an hour and a minute
        for step in (timedelta(hours=12), timedelta(hours=1, minutes=1)):
            now += step
            after = certificates.renewed(held, "one.svc", now)
            if after is held:
                continue
            if after.certificate != held.certificate:
                # The authority that API servers knew before this renewal verifies the new certificate already.
                leaf(after).verify_directly_issued_by(
                    next(each for each in trusted(held) if each.subject == leaf(after).issuer)
                )
            else:
                assert after.authorities != held.authorities
            bundles.append(after.authorities)
            held = after
        seen.add(held.certificate)
        assert leaf(held).not_valid_after_utc > now
    assert len(trusted(held)) <= 3
    assert len({*bundles}) >= 2


@pytest.mark.parametrize("field", ["authorities", "authority_key", "certificate", "key"])
@pytest.mark.parametrize("how", ["garbage", "of another"])
def test_a_damaged_secret_is_replaced(field: str, how: str) -> None:
    held, other = (certificates.renewed(None, "one.svc", NOW) for _ in range(2))
    damaged = msgspec.structs.replace(held, **{field: b"x" if how == "garbage" else getattr(other, field)})
    made = certificates.renewed(damaged, "one.svc", NOW + timedelta(hours=3))
    assert made != damaged
    leaf(made).verify_directly_issued_by(trusted(made)[0])


def test_a_secret_with_a_certificate_that_names_no_host_or_a_locked_key_is_replaced() -> None:
    held = certificates.renewed(None, "one.svc", NOW)
    [authority] = trusted(held)
    key: Any = serialization.load_pem_private_key(held.authority_key, password=None)
    nameless = (
        x509.CertificateBuilder()
        .subject_name(authority.subject)
        .issuer_name(authority.subject)
        .public_key(authority.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + certificates.LIFE)
        .sign(key, hashes.SHA256())
    )
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    for damaged in (
        msgspec.structs.replace(
            held, certificate=nameless.public_bytes(serialization.Encoding.PEM), key=held.authority_key
        ),
        msgspec.structs.replace(held, key=locked),
    ):
        made = certificates.renewed(damaged, "one.svc", NOW)
        leaf(made).verify_directly_issued_by(trusted(made)[0])
        assert leaf(made) != leaf(damaged)


def test_another_host_gets_another_certificate_and_an_expired_one_is_replaced_at_once() -> None:
    held = certificates.renewed(None, "one.svc", NOW)
    for made in (
        certificates.renewed(held, "10.0.0.1", NOW + timedelta(minutes=1)),
        certificates.renewed(held, "one.svc", NOW + timedelta(days=4000)),
    ):
        leaf(made).verify_directly_issued_by(trusted(made)[0])
        assert made.certificate != held.certificate
    assert len(trusted(made)) == 1  # expired authorities are dropped


# --- the server ---------------------------------------------------------------------------------------------------


async def _post(port: int, held: Held, body: bytes, **more: Any) -> tuple[int, bytes]:
    context = ssl.create_default_context(cadata=held.authorities.decode())
    async with aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{port}{serving.PATH}"
        async with session.post(url, data=body, ssl=context, **more) as answer:
            return answer.status, await answer.read()


async def test_reviews_are_answered_over_tls_and_the_next_connection_gets_a_renewed_certificate() -> None:
    now = datetime.now(UTC)
    server, held = Server(VERSIONS), certificates.renewed(None, "127.0.0.1", now)
    async with server.listening(free_port()) as port:
        assert not server.serves
        server.show(held)
        assert server.serves
        asked = json.dumps(review(pipeline(modelPath="a"))).encode()
        status, body = await _post(port, held, asked)
        assert (status, json.loads(body)["response"]["result"]) == (200, {"status": "Success"})
        other = certificates.renewed(None, "127.0.0.1", now)
        server.show(other)
        assert (await _post(port, other, asked))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await _post(port, held, asked)


async def test_each_answer_ends_its_connection_also_while_the_server_leaves() -> None:
    """An API server keeps connections and repeats no review, so one that the server closed while idle could cost it."""
    server, held = Server(VERSIONS), certificates.renewed(None, "127.0.0.1", datetime.now(UTC))
    server.show(held)
    asked = json.dumps(review()).encode()
    context = ssl.create_default_context(cadata=held.authorities.decode())
    head = f"POST /convert HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n".encode()
    ends, leaves_now, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def leave() -> None:
        leaves_now.set()
        await gone.wait()

    async def serve(ready: asyncio.Future[int]) -> None:
        async with server.listening(free_port(), leave=leave) as port:
            ready.set_result(port)
            await ends.wait()

    ready = asyncio.get_running_loop().create_future()
    served = asyncio.create_task(serve(ready))
    try:
        for leaves in (False, True):
            if leaves:
                ends.set()
                await leaves_now.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", await ready, ssl=context)
            writer.write(head + asked)
            async with asyncio.timeout(patience(30)):
                answer = (await reader.read()).lower()
            writer.close()
            assert answer.startswith(b"http/1.1 200") and b"connection: close" in answer
    finally:
        ends.set()
        gone.set()
    await served


async def test_what_is_too_large_unreadable_or_without_a_length_is_refused() -> None:
    server, held = Server(VERSIONS), certificates.renewed(None, "127.0.0.1", datetime.now(UTC))
    server.show(held)
    async with server.listening(free_port()) as port:
        assert (await _post(port, held, b"x"))[0] == 400

        async def chunks() -> Any:
            yield b"{}"

        context = ssl.create_default_context(cadata=held.authorities.decode())
        async with aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{port}{serving.PATH}"
            async with session.post(url, data=chunks(), ssl=context) as answer:
                assert answer.status == 411
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(f"POST /convert HTTP/1.1\r\nHost: x\r\nContent-Length: {serving.MAX_NBYTES + 1}\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()
        assert (await _post(port, held, json.dumps(review()).encode()))[0] == 200


# --- the Secret and the CRD ---------------------------------------------------------------------------------------


def one(name: str, *, storage: bool = False, served: bool = True) -> dict[str, Any]:
    """A version in the CRD."""
    return {"name": name, "served": served, "storage": storage}


class Cluster(ApiServer):
    """The API server with the objects that a publisher reads."""

    def __init__(self) -> None:
        super().__init__()
        self.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": "omni", "name": "web"}})
        self.definition: Any = {"metadata": {"resourceVersion": "1"}, "spec": {"versions": [one("v1", storage=True)]}}
        self.patches: list[Any] = []
        self.meanwhile: list[Any] = []
        self.over = False

    async def get(self, kind: Any, namespace: Any, name: str) -> Any:
        return self.definition if kind is DEFINITION else await super().get(kind, namespace, name)

    async def replace(self, manifest: Any, *, timeout_s: float) -> Any:
        for write in self.meanwhile:
            self.put(write)
        self.meanwhile = []
        now = await super().get(SECRET, "omni", "web")
        if now["metadata"]["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
            raise errors.Conflict("PUT", 409, "changed")
        return self.put({**manifest, "metadata": {"namespace": "omni", "name": "web"}})

    async def merge(
        self, kind: Any, namespace: Any, name: str, patch: Any, *, manager: str = "", timeout_s: float = 0.0
    ) -> Any:
        assert timeout_s >= 60, "the API server compiles all rules of all versions"
        assert (kind, namespace, name) == (DEFINITION, None, "omnipipelines.omnipipeline.dev")
        metadata = self.definition["metadata"]
        if patch["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise errors.Conflict("PATCH", 409, "changed")
        self.patches.append({key: value for key, value in patch.items() if key != "metadata"})
        self.definition = {
            **self.definition,
            "metadata": {**metadata, **patch["metadata"], "resourceVersion": str(int(metadata["resourceVersion"]) + 1)},
            "spec": {**self.definition["spec"], **patch.get("spec", {})},
        }
        return self.definition


async def test_replicas_share_one_certificate_and_write_nothing_more() -> None:
    cluster, now = Cluster(), datetime.now(UTC)
    configuration = ConversionSettings(port=1, namespace="omni", name="web")
    servers = [Server(VERSIONS), Server(VERSIONS)]
    first, second = (Publisher(cluster, each, configuration, clock=lambda: now) for each in servers)  # type: ignore[arg-type]
    await first.publish()
    secret = await cluster.get(SECRET, "omni", "web")
    await second.publish()
    await first.publish()
    assert [each.serves for each in servers] == [True, True]
    assert await cluster.get(SECRET, "omni", "web") == secret
    assert len(cluster.patches) == 1
    conversion = cluster.definition["spec"]["conversion"]
    bundle = conversion["webhook"]["clientConfig"].pop("caBundle")
    assert bundle == secret["data"]["ca.crt"]
    assert conversion == {
        "strategy": "Webhook",
        "webhook": {
            "conversionReviewVersions": ["v1"],
            "clientConfig": {"service": {"name": "web", "namespace": "omni", "path": "/convert", "port": 443}},
        },
    }


async def test_of_two_replicas_that_start_together_one_makes_the_certificate() -> None:
    cluster, server = Cluster(), Server(VERSIONS)
    now = datetime.now(UTC)
    publisher = Publisher(cluster, server, ConversionSettings(port=1, namespace="omni", name="web"), clock=lambda: now)  # type: ignore[arg-type]
    cluster.meanwhile = [{"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": "omni", "name": "web"}}]
    with pytest.raises(errors.Conflict):
        await publisher.publish()
    assert (server.serves, cluster.patches) == (False, [])
    await publisher.publish()
    assert (server.serves, len(cluster.patches)) == (True, 1)
    assert CRD == "omnipipelines.omnipipeline.dev"


CONFIGURED = ConversionSettings(port=1, namespace="omni", name="web")


async def test_a_publisher_says_once_that_the_definition_is_gone_and_publishes_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bereft(Cluster):
        looks = 0

        async def get(self, kind: Any, namespace: Any, name: str) -> Any:
            self.looks += kind is DEFINITION
            if kind is DEFINITION and self.looks <= 5:
                raise errors.NotFound(f"GET {name}", 404, "not found")
            return await super().get(kind, namespace, name)

    cluster, server = Bereft(), Server(VERSIONS)
    publisher = Publisher(cluster, server, CONFIGURED, clock=lambda: NOW, retry_s=0.0)  # type: ignore[arg-type]
    keeping = asyncio.create_task(publisher.keep())
    async with asyncio.timeout(patience(30)):
        while not server.serves:
            await asyncio.sleep(0)
    keeping.cancel()
    assert (cluster.looks, len(cluster.patches)) == (6, 1)
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1 and "omnipipelines.omnipipeline.dev" in warned[0], warned


def definition(*versions: Any, stored: tuple[str, ...] = ("v1",), name: str = "web") -> Any:
    service = {"name": name, "namespace": "omni", "path": "/convert", "port": 443}
    webhook = {"clientConfig": {"service": service, "caBundle": "x"}, "conversionReviewVersions": ["v1"]}
    managers = [{"manager": "helm"}, {"manager": publishing.MANAGER}]
    return {
        "metadata": {"resourceVersion": "1", "managedFields": managers},
        "spec": {"versions": [*versions], "conversion": {"strategy": "Webhook", "webhook": webhook}},
        "status": {"storedVersions": [*stored]},
    }


NONE = {"conversion": {"strategy": "None", "webhook": None}}


@pytest.mark.parametrize(
    "found, expected",
    [
        (definition(one("v1", storage=True)), NONE),
        (
            definition(one("v1", storage=True), one("v2")),
            {**NONE, "versions": [one("v1", storage=True), one("v2", served=False)]},
        ),
        (
            definition(one("v1"), one("v2", storage=True), stored=("v2",)),
            {**NONE, "versions": [one("v1", served=False), one("v2", storage=True)]},
        ),
        (definition(one("v1", storage=True), one("v2", served=False), stored=("v1", "v2")), NONE),
    ],
)
async def test_a_withdrawn_webhook_leaves_the_stored_version_alone_to_be_served(found: Any, expected: Any) -> None:
    cluster = Cluster()
    cluster.definition = found
    await withdrawing.withdraw(cluster, CONFIGURED)  # type: ignore[arg-type]
    assert cluster.patches == [{"spec": expected}, {}]
    assert cluster.definition["metadata"]["managedFields"] == [{"manager": "helm"}], (
        "or helm's next apply is a conflict"
    )
    with pytest.raises(errors.NotFound):
        await cluster.get(SECRET, "omni", "web")
    await withdrawing.withdraw(cluster, CONFIGURED)  # type: ignore[arg-type]
    with pytest.raises(errors.NotFound):
        await Publisher(cluster, Server(VERSIONS), CONFIGURED, clock=lambda: NOW).publish()  # type: ignore[arg-type]
    assert len(cluster.patches) == 2, "neither writes it again"


async def test_a_webhook_is_not_withdrawn_while_objects_may_be_stored_in_two_versions() -> None:
    cluster = Cluster()
    cluster.definition = definition(one("v1", storage=True), one("v2"), stored=("v1", "v2"))
    with pytest.raises(withdrawing.StillNeeded, match=r"stored as v1 and v2.*storedVersions of the CRD to \[v1\]"):
        await withdrawing.withdraw(cluster, CONFIGURED)  # type: ignore[arg-type]
    assert (cluster.patches, cluster.writes) == ([], [])


@pytest.mark.parametrize("conversion", [None, {"strategy": "None"}, definition(name="other")["spec"]["conversion"]])
async def test_another_releases_webhook_is_left_alone(conversion: Any) -> None:
    cluster = Cluster()
    cluster.definition = definition(one("v1", storage=True), one("v2"))
    cluster.definition["spec"]["conversion"] = conversion
    await withdrawing.withdraw(cluster, CONFIGURED)  # type: ignore[arg-type]
    assert (cluster.patches, cluster.writes) == ([], [])


async def test_an_operator_that_has_read_the_secret_before_cannot_publish_after_the_withdrawal() -> None:
    """The order of reads and writes makes it a Conflict, wherever the withdrawal falls between them."""

    class Interrupted(Cluster):
        async def get(self, kind: Any, namespace: Any, name: str) -> Any:
            found = await super().get(kind, namespace, name)
            if kind is SECRET and not self.over:
                self.over = True
                await withdrawing.withdraw(self, CONFIGURED)  # type: ignore[arg-type]
            return found

    cluster = Interrupted()
    cluster.over = True
    await Publisher(cluster, Server(VERSIONS), CONFIGURED, clock=lambda: NOW).publish()  # type: ignore[arg-type]
    cluster.over = False
    # Another authority: what is published is no longer what the CRD says.
    cluster.definition["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] = "another"
    with pytest.raises(errors.ClusterError):
        await Publisher(cluster, Server(VERSIONS), CONFIGURED, clock=lambda: NOW).publish()  # type: ignore[arg-type]
    assert cluster.definition["spec"]["conversion"]["strategy"] == "None"


def test_the_operator_refuses_a_command_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["withdraw"]) == 2
    assert capsys.readouterr().err == "expected no argument or withdraw-conversion, got: withdraw\n"


def test_the_webhook_is_off_unless_it_has_a_port() -> None:
    image = {"OMNI_OPERATOR_STAGE_IMAGE": "x", "OMNI_OPERATOR_NAMESPACE": "omni"}
    assert settings.read(image, hostname="h").conversion is None
    more = {"OMNI_OPERATOR_CONVERSION_PORT": "8443", "OMNI_OPERATOR_CONVERSION_NAME": "web"}
    read = settings.read({**image, **more}, hostname="h").conversion
    assert read == ConversionSettings(port=8443, namespace="omni", name="web")
    assert read.host == "web.omni.svc"
    with pytest.raises(errors.ConfigurationError, match="OMNI_OPERATOR_CONVERSION_NAME is not set"):
        settings.read({**image, "OMNI_OPERATOR_CONVERSION_PORT": "8443"}, hostname="h")


def test_an_operator_without_the_webhook_does_not_import_what_makes_certificates() -> None:
    """They are 9 MiB of its memory."""
    program = "import omnipipeline_operator.cli, sys; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout == "False\n", done.stderr


DEEP = """
import sys
from omnipipeline_operator import cli
from omnipipeline_operator.conversion import reviews
from omnipipeline_spec.conversion import kept, versions

sys.setrecursionlimit(cli.MOST_CALLS)
deep = '{"a":' * 200_000 + "1" + "}" * 200_000
print(kept.read({"annotations": {kept.ANNOTATION: '{"v": [{"at": [], "value": ' + deep + "}]}"}}))
try:
    reviews.answer(deep.encode(), versions.Versions())
except reviews.NotAReview as error:
    print(error)
"""


def test_a_body_of_more_levels_than_a_stack_takes_is_refused_and_the_operator_stays() -> None:
    """The depth that ``main`` allows for objects of the API server must not be enough to end the process."""
    ended = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=patience(60))
    assert ended.returncode == 0, ended
    notes, refusal = ended.stdout.splitlines()
    assert notes == "{}" and refusal.startswith("the body is not JSON: maximum recursion depth exceeded")
