"""A driver of Dynamic Resource Allocation for the kit's node: registers at its kubelet, and prepares claims there.

Here: the part of a driver that a kubelet asks, by its gRPC (kubelet's `dra/v1` and `pluginregistration/v1`). Not here:
publishing devices, which a test does itself. The devices do not exist, so pods get nothing of them: no CDI device is
named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

STRING, BOOL, MESSAGE = 9, 8, 11  # of FieldDescriptorProto.Type
ONE, MANY = 1, 3  # of FieldDescriptorProto.Label
PLUGIN: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION: Final = "pluginregistration.Registration"
#: Message -> its fields, in the order of their numbers. A name of a message stands for its type.
MESSAGES: Final[dict[str, tuple[tuple[str, int, int | str], ...]]] = {
    "InfoRequest": (),
    "PluginInfo": (
        ("type", ONE, STRING),
        ("name", ONE, STRING),
        ("endpoint", ONE, STRING),
        ("supported_versions", MANY, STRING),
    ),
    "RegistrationStatus": (("plugin_registered", ONE, BOOL), ("error", ONE, STRING)),
    "RegistrationStatusResponse": (),
    "Claim": (("namespace", ONE, STRING), ("uid", ONE, STRING), ("name", ONE, STRING)),
    "Claims": (("claims", MANY, "Claim"),),
    "Device": (
        ("request_names", MANY, STRING),
        ("pool_name", ONE, STRING),
        ("device_name", ONE, STRING),
        ("cdi_device_ids", MANY, STRING),
    ),
    "Prepared": (("devices", MANY, "Device"), ("error", ONE, STRING)),
    "OfClaim": (("key", ONE, STRING), ("value", ONE, "Prepared")),  # an entry of a map is such a message
    "PreparedClaims": (("claims", MANY, "OfClaim"),),
    "Unprepared": (("error", ONE, STRING),),
    "OfUnprepared": (("key", ONE, STRING), ("value", ONE, "Unprepared")),
    "UnpreparedClaims": (("claims", MANY, "OfUnprepared"),),
}


def _types() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="claim_driver.proto", package="claim_driver", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, label, kind) in enumerate(fields, start=1):
            added = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = MESSAGE, f".claim_driver.{kind}"
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"claim_driver.{name}")) for name in MESSAGES
    }


TYPES: Final = _types()


class ClaimDriver:
    """Prepares each claim that the kubelet asks for, unless ``refusal`` says why it does not."""

    def __init__(self, name: str, kubelet: Path, *, refusal: str = "") -> None:
        """kubelet: its folder on this machine, which is the node."""
        self._name = name
        self._registration = kubelet / "plugins_registry" / f"{name}-reg.sock"
        self._endpoint = kubelet / "plugins" / name / "dra.sock"
        self.refusal = refusal
        self.prepared: dict[str, str] = {}  #: uid -> the claim's name, as long as it is prepared.
        self.registered = threading.Event()
        self._servers: list[grpc.Server] = []

    def __enter__(self) -> ClaimDriver:
        self._endpoint.parent.mkdir(parents=True, exist_ok=True)
        plugin: dict[str, tuple[Callable[[Any], Any], str]] = {
            "NodePrepareResources": (self._prepare, "Claims"),
            "NodeUnprepareResources": (self._unprepare, "Claims"),
        }
        registration: dict[str, tuple[Callable[[Any], Any], str]] = {
            "GetInfo": (self._info, "InfoRequest"),
            "NotifyRegistrationStatus": (self._told, "RegistrationStatus"),
        }
        self._serve(self._endpoint, PLUGIN, plugin)
        self._serve(self._registration, REGISTRATION, registration)  # the kubelet sees this file, and asks at once
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for socket in (self._registration, self._endpoint):
            socket.unlink(missing_ok=True)
        for server in self._servers:
            server.stop(None).wait()

    def _serve(self, socket: Path, service: str, calls: Mapping[str, tuple[Callable[[Any], Any], str]]) -> None:
        socket.unlink(missing_ok=True)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                lambda request, _, answer=answer: answer(request),
                request_deserializer=TYPES[taken].FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (answer, taken) in calls.items()
        }
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        self._servers.append(server)

    def _info(self, _: Any) -> Any:
        return TYPES["PluginInfo"](
            type="DRAPlugin", name=self._name, endpoint=str(self._endpoint), supported_versions=["v1.DRAPlugin"]
        )

    def _told(self, status: Any) -> Any:
        if status.plugin_registered:
            self.registered.set()
        return TYPES["RegistrationStatusResponse"]()

    def _prepare(self, request: Any) -> Any:
        entries = []
        for claim in request.claims:
            if not self.refusal:
                self.prepared[claim.uid] = claim.name
            entries.append(TYPES["OfClaim"](key=claim.uid, value=TYPES["Prepared"](error=self.refusal)))
        return TYPES["PreparedClaims"](claims=entries)

    def _unprepare(self, request: Any) -> Any:
        for claim in request.claims:
            self.prepared.pop(claim.uid, None)
        entries = [TYPES["OfUnprepared"](key=one.uid, value=TYPES["Unprepared"]()) for one in request.claims]
        return TYPES["UnpreparedClaims"](claims=entries)
