"""W3C trace context and OpenTelemetry's variables."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.errors import ConfigurationError
from stage_runtime.telemetry import settings, traceparents
from stage_runtime.telemetry.settings import TelemetrySettings

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_the_clients_trace_goes_on_and_its_decision_holds_whatever_the_ratio(flags: str, sampled: bool) -> None:
    for ratio in (0.0, 1.0):
        found = traceparents.begin(f"00-{TRACE}-{SPAN}-{flags}", ratio=ratio)
        assert (found.trace_id, found.parent_id, found.sampled) == (TRACE, SPAN, sampled)
        assert found.span_id not in (SPAN, "")
        assert found.header == f"00-{TRACE}-{found.span_id}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "junk",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_what_is_no_trace_context_begins_a_new_trace(given: str | None) -> None:
    found = traceparents.begin(given, ratio=1.0)
    assert found.trace_id != TRACE and len(found.trace_id) == 32
    assert found.parent_id is None and found.sampled
    assert not traceparents.begin(given, ratio=0.0).sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert traceparents.begin(f"cc-{TRACE}-{SPAN}-01-what-will-be", ratio=0.0).trace_id == TRACE


@given(st.text(max_size=80))
def test_no_header_breaks_it(given_header: str) -> None:
    assert len(traceparents.begin(given_header, ratio=0.5).header) == 55


def test_the_ratio_is_kept() -> None:
    sampled = sum(traceparents.begin(None, ratio=0.25).sampled for _ in range(4000))
    assert 800 < sampled < 1200  # six standard deviations


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, TelemetrySettings(endpoint="http://c:4318/v1/traces")),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/t"}, TelemetrySettings(endpoint="https://c/t")),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0.5",
                "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x,tenant=a",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
                "OTEL_SERVICE_NAME": "mine",
            },
            TelemetrySettings(
                endpoint="http://c/v1/traces",
                ratio=0.5,
                headers={"authorization": "Bearer x", "tenant": "a"},
                resource={"deployment.environment": "test", "service.name": "mine"},
            ),
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "parentbased_always_off"},
            TelemetrySettings(endpoint="http://c/v1/traces", ratio=0.0),
        ),
    ],
)
def test_the_variables_say_where_traces_go(environ: dict[str, str], expected: TelemetrySettings | None) -> None:
    assert settings.read(environ) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:four"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:43180000"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "2"),
        ("OTEL_TRACES_SAMPLER_ARG", "many"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "novalue"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    with pytest.raises(ConfigurationError, match=f"^{name}: "):
        settings.read({**environ, name: value})


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("vendor=1", "vendor=1"),
        ("a=1,b=2\t, c@d=3", "a=1,b=2\t, c@d=3"),
        ("", ""),
        ("x" * 513, ""),
        ("a=\u00e9", ""),
        ("a=1\n", ""),
        (None, ""),
    ],
)
def test_the_clients_tracestate_is_kept_or_dropped_whole(state: str | None, kept: str) -> None:
    assert traceparents.begin(f"00-{'a' * 32}-{'b' * 16}-01", ratio=1.0, state=state).state == kept
    assert traceparents.begin(None, ratio=1.0, state=state).state == ""  # without its trace it belongs to none


def test_a_stages_span_has_one_id_wherever_it_is_made() -> None:
    assert traceparents.stage_span_id("b" * 16, "thinker") == traceparents.stage_span_id("b" * 16, "thinker")
    assert (
        len({traceparents.stage_span_id(span, stage) for span in ("b" * 16, "c" * 16) for stage in ("a", "\ud800")})
        == 4
    )
    assert re.fullmatch(r"[0-9a-f]{16}", traceparents.stage_span_id("b" * 16, "a"))
