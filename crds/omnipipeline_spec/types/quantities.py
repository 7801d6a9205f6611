"""Constrained types of the spec's fields: names, Kubernetes quantities, durations, ports.

Here: the types with their patterns and bounds (they become the CRD's), parsers and formatters of quantities, and
slugs. Not here: any field that uses them (`pipeline`, `cluster`). Called by every other module of the contract;
imports none of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Annotated, Final

from msgspec import Meta

# Patterns are written for Go's RE2 and Python's re alike, and anchored: the API server searches, it does not match.
NAME_PATTERN: Final = r"^[a-z]([-_a-z0-9]*[a-z0-9])?$"
FUNCTION_PATTERN: Final = (
    r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
    r"([.][A-Za-z_][A-Za-z0-9_]*|:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)$"
)
RESOURCE_NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
QUANTITY_PATTERN: Final = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?([0-2]?[0-9]|30))?$"
ENV_NAME_PATTERN: Final = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
ENV_PREFIX_PATTERN: Final = "^[-._a-zA-Z0-9]+$"
# Kubernetes' own forms, as its API server checks them in the objects that are made of a pipeline.
_DNS_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME: Final = f"{_DNS_LABEL}([.]{_DNS_LABEL})*"
_WORD: Final = "[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
OBJECT_NAME_PATTERN: Final = f"^{_DNS_NAME}$"
NAMESPACE_PATTERN: Final = f"^{_DNS_LABEL}$"
HOST_PATTERN: Final = f"^([*][.])?{_DNS_NAME}$"
_LABEL: Final = f"({_DNS_NAME}/)?{_WORD}"
_ANNOTATION: Final = f"({_DNS_NAME.replace('a-z', 'A-Za-z')}/)?{_WORD}"
LABEL_PATTERN: Final = f"^{_LABEL}$"
LABEL_VALUE_PATTERN: Final = f"^({_WORD})?$"
ANNOTATION_PATTERN: Final = f"^{_ANNOTATION}$"
DEVICE_PATTERN: Final = f"^{_DNS_NAME}/{_WORD}$"
AMOUNT_PATTERN: Final = f"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*[KMGT]i|{_DNS_NAME}/{_WORD})$"
DATA_KEY_PATTERN: Final = "^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$"
FIELD_PATTERN: Final = (
    rf"^(metadata[.](name|namespace|uid|labels\['{_LABEL}'\]|annotations\['{_ANNOTATION}'\])|"
    "spec[.](nodeName|serviceAccountName|host)|status[.](hostIP|podIP)s?)$"
)
IMAGE_PATTERN: Final = r"^\S+$"
AMOUNT_FIELD_PATTERN: Final = "^(limits|requests)[.](cpu|memory|ephemeral-storage|hugepages-.+)$"
#: Pattern -> what it asks for, in words.
FORMS: Final[Mapping[str, str]] = {
    OBJECT_NAME_PATTERN: "a name of Kubernetes: lower case letters, digits, - and ., a letter or digit beside each .",
    NAMESPACE_PATTERN: "a namespace: lower case letters, digits and -, with a letter or digit first and last",
    HOST_PATTERN: "a host name: lower case letters, digits, - and ., perhaps *. first",
    LABEL_PATTERN: "the name of a label, such as example.com/name",
    LABEL_VALUE_PATTERN: "the value of a label: up to 63 letters, digits, -, _ and ., a letter or digit first and last",
    ANNOTATION_PATTERN: "the name of an annotation, such as example.com/name",
    DEVICE_PATTERN: "an extended resource, such as nvidia.com/gpu",
    AMOUNT_PATTERN: "a resource of containers: cpu, memory, ephemeral-storage, hugepages-2Mi, or like nvidia.com/gpu",
    DATA_KEY_PATTERN: "a key of a Secret or ConfigMap: letters, digits, -, _ and ., and not .. first",
    FIELD_PATTERN: "a field of a pod for variables, such as metadata.name, status.podIP or metadata.labels['a']",
    AMOUNT_FIELD_PATTERN: "an amount of a container, such as limits.cpu or requests.memory",
    IMAGE_PATTERN: "the reference of an image: it has no blanks",
    ENV_PREFIX_PATTERN: "the beginning of a variable's name: letters, digits, -, _ and .",
    ENV_NAME_PATTERN: "the name of a variable: letters, digits, -, _ and ., no digit first",
}

MAX_NAME: Final = 63  # a Kubernetes label value
MAX_STAGES: Final = 64  # with 16 edges each: the most that the API server's cost limit for rules allows
MAX_EDGES: Final = 16
MAX_PIPELINE_NAME: Final = 38  # leaves room for "-<unit>-<hash>" in a pod's host name
MAX_GPUS_PER_STAGE: Final = MAX_EDGES
QUOTA_PREFIX: Final = "requests."  # before the name of an extended resource in a ResourceQuota, and in no container
RESERVED_SUFFIX: Final = "-peers"  # the headless Service of pipeline p is called p-peers

Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=NAME_PATTERN)]
Function = Annotated[str, Meta(max_length=256, pattern=FUNCTION_PATTERN)]
Text = Annotated[str, Meta(max_length=1024)]
ShortText = Annotated[str, Meta(max_length=253)]
ResourceName = Annotated[str, Meta(max_length=253, pattern=OBJECT_NAME_PATTERN)]
Namespace = Annotated[str, Meta(max_length=63, pattern=NAMESPACE_PATTERN)]
LabelName = Annotated[str, Meta(max_length=253, pattern=LABEL_PATTERN)]
LabelValue = Annotated[str, Meta(max_length=63, pattern=LABEL_VALUE_PATTERN)]
AnnotationName = Annotated[str, Meta(max_length=253, pattern=ANNOTATION_PATTERN)]
#: An extended resource: a kind of device.
DeviceResource = Annotated[str, Meta(max_length=253, pattern=DEVICE_PATTERN)]
#: A resource that a container may request.
AmountName = Annotated[str, Meta(max_length=253, pattern=AMOUNT_PATTERN)]
DataKey = Annotated[str, Meta(max_length=253, pattern=DATA_KEY_PATTERN)]
ImageReference = Annotated[str, Meta(max_length=1024, pattern=IMAGE_PATTERN)]
ShortReference = Annotated[str, Meta(max_length=253, pattern=IMAGE_PATTERN)]
PodField = Annotated[str, Meta(max_length=253, pattern=FIELD_PATTERN)]
AmountField = Annotated[str, Meta(max_length=253, pattern=AMOUNT_FIELD_PATTERN)]
#: An expression of CEL; the length is Kubernetes' own bound of one that selects devices.
Expression = Annotated[str, Meta(min_length=1, max_length=10240)]
EnvName = Annotated[str, Meta(max_length=253, pattern=ENV_NAME_PATTERN)]
EnvPrefix = Annotated[str, Meta(max_length=253, pattern=ENV_PREFIX_PATTERN)]
EnvValue = Annotated[str, Meta(max_length=32768)]
#: A Kubernetes quantity. ``extra`` tells the schema and the reader that an integer is accepted too.
Quantity = Annotated[str, Meta(max_length=20, pattern=QUANTITY_PATTERN, extra={"quantity": True})]
GpuId = Annotated[int, Meta(ge=0, le=1023)]
Fraction01 = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
WholeSeconds = Annotated[int, Meta(ge=1, le=31_536_000)]
Port = Annotated[int, Meta(ge=1, le=65535)]
HostPattern = Annotated[str, Meta(max_length=253, pattern=HOST_PATTERN)]

_BINARY: Final[Mapping[str, int]] = {f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL: Final[Mapping[str, Fraction]] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(10 ** (3 * power)) for power, letter in enumerate("kMGTPE", 1)},
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?")


def parse_quantity(text: str | int) -> Fraction:
    """The exact value of a Kubernetes quantity such as ``500m``, ``12Gi``, ``1e3`` or ``4``.

    Raises: ValueError: not a quantity, or negative (no field of the spec allows that).
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity: write a number with an optional unit, such as 500m, 12Gi or 8")
    number, suffix = Fraction(f"0{found[1]}" if found[1].startswith(".") else found[1].rstrip(".")), found[2] or ""
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    if suffix in _DECIMAL:
        return number * _DECIMAL[suffix]
    exponent = int(suffix[1:])
    if abs(exponent) > 30:
        raise ValueError(f"{text!r} is out of range for a Kubernetes quantity")
    return number * Fraction(10) ** exponent


def parse_bytes(text: str | int) -> int:
    """Bytes of a quantity, rounded up as Kubernetes does.

    Raises: ValueError: not a quantity, or not positive.
    """
    value = parse_quantity(text)
    if value <= 0:
        raise ValueError(f"{text!r} must be more than 0 bytes")
    return -(-value.numerator // value.denominator)


def format_quantity(value: Fraction | int) -> str:
    """The canonical spelling of an amount: ``64Gi`` for 65536Mi, ``8`` for 8000m, ``500m`` for 0.5.

    Binary units are used from 1 KiB on when they are exact. Fractions finer than 1/1000 are rounded up.
    """
    exact = Fraction(value)
    if exact.denominator != 1:
        return f"{-(-exact.numerator * 1000 // exact.denominator)}m"
    whole = exact.numerator
    for suffix, factor in reversed(tuple(_BINARY.items())):
        if whole and whole % factor == 0:
            return f"{whole // factor}{suffix}"
    return str(whole)


def sum_quantities(amounts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Resource lists added up by resource name, in canonical spelling and order."""
    totals: dict[str, Fraction] = {}
    for resources in amounts:
        for resource, amount in resources.items():
            totals[resource] = totals.get(resource, Fraction(0)) + parse_quantity(amount)
    return {resource: format_quantity(totals[resource]) for resource in sorted(totals)}


def slug(name: str) -> str:
    """A stage's or group's name as a Kubernetes name: ``_`` becomes ``-``."""
    return name.replace("_", "-")


def is_object_name(name: str) -> bool:
    """Whether an object of Kubernetes may have this name."""
    return len(name) <= 253 and re.fullmatch(OBJECT_NAME_PATTERN[1:-1], name) is not None


def is_pipeline_name(name: str) -> bool:
    """Whether this is a valid name of a resource; the CRD's root rule checks the same."""
    fits = len(name) <= MAX_PIPELINE_NAME and re.fullmatch(RESOURCE_NAME_PATTERN[1:-1], name) is not None
    return fits and not name.endswith(RESERVED_SUFFIX)


def pipeline_slug(name: str) -> str:
    """A valid resource name from any text; a valid name is returned unchanged.

    The owner of a hub id is removed (``Qwen/Qwen3-Omni`` becomes ``qwen3-omni``). A name that is truncated gets four
    digits of a hash, so that two long names stay different.
    """
    if is_pipeline_name(name):
        return name
    base = re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-") or "pipeline"
    if not base[0].isalpha():
        base = f"p-{base}"
    if len(base) > MAX_PIPELINE_NAME:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:4]
        base = f"{base[: MAX_PIPELINE_NAME - 5].rstrip('-')}-{digest}"
    if base.endswith(RESERVED_SUFFIX):
        base = f"{base[: MAX_PIPELINE_NAME - 9].removesuffix(RESERVED_SUFFIX).rstrip('-')}-pipeline"
    return base
