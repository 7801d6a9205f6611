"""The table of OpenAI's routes: the contract, the code, the kinds of requests and the page have the same rows."""

from __future__ import annotations

import typing

import msgspec
import pytest

from omnipipeline_spec.types.routes import ROUTES, SOCKETS, OpenAIRoute, Served
from stage_runtime.web.openai_routes import CODE, SOCKET_CODE
from stage_runtime.wire.values import RequestKind
from tests.docs.blocks import ROOT


def test_each_path_of_the_contract_has_code_and_no_other() -> None:
    assert [one.path for one in ROUTES] == list(CODE)
    assert [one.path for one in SOCKETS] == list(SOCKET_CODE)


def test_each_value_of_serves_opens_a_path_and_no_other_does() -> None:
    assert {one.serves for one in ROUTES} | {one.serves for one in SOCKETS} == set(typing.get_args(Served))


def test_each_kind_is_one_that_a_request_can_have() -> None:
    assert {one.kind for one in ROUTES} <= set(typing.get_args(RequestKind))


@pytest.mark.parametrize("route", ROUTES, ids=lambda one: one.path)
def test_the_page_says_which_value_of_serves_opens_it(route: OpenAIRoute) -> None:
    page = (ROOT / "docs" / "http-api.md").read_text()
    assert f"| `POST {route.path}` | when `serves` has `{route.serves}` |" in page


@pytest.mark.parametrize("route", [one for one in ROUTES if not one.example.file], ids=lambda one: one.path)
def test_the_example_is_a_body_that_the_route_reads(route: OpenAIRoute) -> None:
    body = {"model": "m", **route.example.body}
    assert msgspec.convert(body, CODE[route.path].body) is not None
