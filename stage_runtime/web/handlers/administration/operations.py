"""The route for operations of stages' own engines. It is on the admin port, behind the API keys."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from stage_runtime.coordinator.questions.stage_operations import OperationResult, Operations
from stage_runtime.errors import InvalidRequest, ValueRefused, describe
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading import bodies
from stage_runtime.wire.parts import NAME_LIMIT

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LIMIT)]


class OperationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /operations."""

    operation: Name
    stages: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=1000)]
    arguments: dict[str, Any] = {}
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class OperationsEndpoint:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def ask(self, exchange: Exchange) -> None:
        """POST /operations: 200 with the answer of every process, whether it has failed or not."""
        body = await bodies.read(exchange, _bodies)
        try:
            answer = await self._operations.ask(
                body.operation, body.stages, body.arguments, timeout_s=body.timeout_seconds
            )
        except ValueRefused as refused:
            raise InvalidRequest(str(refused), param="arguments") from None
        results = [_in_json(one) for one in answer.results]
        failed = sum(one.error is not None for one in results)
        await exchange.reply(msgspec.json.encode(msgspec.structs.replace(answer, results=results, failed=failed)))


_bodies = msgspec.json.Decoder(OperationBody)


def _in_json(result: OperationResult) -> OperationResult:
    """MessagePack carries more than JSON does: map keys that are lists, for example."""
    try:
        return msgspec.structs.replace(result, value=msgspec.Raw(msgspec.json.encode(result.value)))
    except (TypeError, ValueError, RecursionError) as error:
        return msgspec.structs.replace(result, value=None, error=f"its value is not JSON: {describe(error)}")
