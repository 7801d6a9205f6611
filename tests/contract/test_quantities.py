"""Quantities as Kubernetes reads them, and names as it wants them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnipipeline_spec.types import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12Gi", 12 * 2**30),
        ("500M", 500_000_000),
        ("500m", Fraction(1, 2)),
        ("1.5Ki", 1536),
        (".5", Fraction(1, 2)),
        ("1.", 1),
        ("1e3", 1000),
        ("1E3", 1000),  # an exponent: E alone is exa
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("2k", 2000),
        ("3u", Fraction(3, 10**6)),
        ("0", 0),
        (7, 7),
    ],
)
def test_a_quantity_has_the_value_kubernetes_gives_it(text: str | int, value: Fraction | int) -> None:
    assert quantities.parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "Gi", "12 Gi", "12gi", "-1", "1e", "1Gib", "0x10", "1K", "1e99", "one", ".", "1\n"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a quantity|out of range"):
        quantities.parse_quantity(text)


@pytest.mark.parametrize(("text", "nbytes"), [("1500m", 2), ("12Gi", 12 << 30), ("1", 1)])
def test_bytes_are_whole_and_rounded_up(text: str, nbytes: int) -> None:
    assert quantities.parse_bytes(text) == nbytes


def test_no_bytes_at_all_are_no_amount() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        quantities.parse_bytes("0")


@pytest.mark.parametrize(
    ("given_", "canonical"),
    [("65536Mi", "64Gi"), ("8000m", "8"), ("0.5", "500m"), ("1000", "1000"), ("1024", "1Ki"), ("0", "0"), ("1n", "1m")],
)
def test_one_amount_has_one_spelling(given_: str, canonical: str) -> None:
    assert quantities.format_quantity(quantities.parse_quantity(given_)) == canonical


@given(st.integers(0, 2**62))
def test_a_formatted_amount_is_the_amount(amount: int) -> None:
    assert quantities.parse_quantity(quantities.format_quantity(amount)) == amount


def test_resources_add_up_by_name() -> None:
    total = quantities.sum_quantities([{"memory": "64Gi", "cpu": "500m"}, {"cpu": "1.5"}, {}])
    assert total == {"cpu": "2", "memory": "64Gi"}
    assert list(total) == ["cpu", "memory"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("voice", "voice"),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3-omni-30b-a3b-instruct"),
        ("/models/Tiny_LM/", "tiny-lm"),
        ("3d", "p-3d"),
        ("voice-peers", "voice-pipeline"),
        ("///", "pipeline"),
        ("Ünï", "n"),
        ("a" * 60 + "\udcff", f"{'a' * 33}-29d5"),
    ],
)
def test_any_text_becomes_a_legal_name(name: str, slug: str) -> None:
    assert quantities.pipeline_slug(name) == slug


@given(st.text(max_size=80))
def test_a_slug_is_always_legal_and_stays_what_it_is(text: str) -> None:
    slug = quantities.pipeline_slug(text)
    assert quantities.is_pipeline_name(slug)
    assert quantities.pipeline_slug(slug) == slug


def test_two_long_names_stay_two() -> None:
    one, other = (quantities.pipeline_slug(f"{'a' * 50}-{end}") for end in ("x", "y"))
    assert one != other
