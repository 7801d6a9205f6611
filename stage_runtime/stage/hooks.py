"""A stage's user functions, resolved once, and called inside the request's error boundary."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Final

from omnipipeline_spec.types.plan import StagePlan
from stage_runtime.engines.making.resolving import resolve_hook
from stage_runtime.errors import HookError, RequestError, describe
from stage_runtime.rules.graph import routing
from stage_runtime.rules.requests.failures import failure_of
from stage_runtime.wire.values import OmniRequest, Routed, StagePayload

LAZY: Final = (Awaitable, Generator, AsyncGenerator)  # what a hook gives that has not computed anything yet


class Hooks:
    """The hook functions that the plan names. Raises ConfigurationError when made, HookError when called."""

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        self._route = self._find("routeFn", plan.route_fn)
        self._wait_for = self._find("waitForFn", plan.wait_for_fn)
        self._merge = self._find("mergeFn", plan.merge_fn)
        self._stream_done_to = self._find("streamDoneToFn", plan.stream_done_to_fn)
        self._project = {
            target: resolve_hook(name, "projectPayload", field=f"stages.{plan.name}.projectPayload.{target}")
            for target, name in plan.project_payload.items()
        }

    @property
    def passes_on(self) -> bool:
        """No hook chooses the targets of a result or what each gets."""
        return self._route is None and not self._project

    @property
    def has_wait_for(self) -> bool:
        return self._wait_for is not None

    def route(self, request_id: str, output: Any) -> tuple[tuple[str, ...], Mapping[str, Any] | None]:
        """The result's targets; and of a `Routed` answer each one's own data."""
        plan = self._plan
        if self._route is None:
            return plan.next, None
        returned = self._call("routeFn", self._route, request_id, output)
        if isinstance(returned, Routed):
            if not isinstance(returned.payloads, Mapping):
                problem = f"returned omni.Routed of a {type(returned.payloads).__name__}"
                raise HookError(plan.name, "routeFn", f"{problem}; expected a dict: the data of each target")
            return routing.route(plan.name, plan.next, list(returned.payloads)), returned.payloads
        return routing.route(plan.name, plan.next, returned), None

    def active_sources(self, request_id: str, source: str, payload: StagePayload) -> Any:
        return None if self._wait_for is None else self._call("waitForFn", self._wait_for, request_id, source, payload)

    def merge(self, inputs: dict[str, StagePayload]) -> StagePayload:
        """One payload of several. Data that the function returns gets the request of the first input."""
        assert self._merge is not None  # the contract: wait_for needs merge_fn
        first = next(iter(inputs.values()))  # the function may take them out of ``inputs``
        return self._as_payload("mergeFn", self._call("mergeFn", self._merge, inputs), first)

    def project(self, target: str, payload: StagePayload) -> StagePayload:
        """The part of ``payload`` that ``target`` receives."""
        function = self._project.get(target)
        if function is None:
            return payload
        hook = f"projectPayload.{target}"
        own = StagePayload(request=payload.request, data=payload.data)  # other targets get ``payload`` itself
        return self._as_payload(hook, self._call(hook, function, own), payload)

    def stream_done_targets(self, request_id: str, output: Any) -> tuple[str, ...]:
        plan = self._plan
        if self._stream_done_to is None:
            return plan.stream_to
        returned = self._call("streamDoneToFn", self._stream_done_to, request_id, output)
        return routing.done_targets(plan.name, plan.stream_to, returned)

    def _find(self, hook: str, name: str | None) -> Callable[..., Any] | None:
        return resolve_hook(name, hook, field=f"stages.{self._plan.name}.{hook}") if name else None

    def _call(self, hook: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            returned = function(*arguments)
        except RequestError as error:  # a new one: the author may raise the same object elsewhere
            failure = failure_of(error, self._plan.name, hook)
            raise RequestError(
                failure.code, failure.message, stage=failure.stage, hook=failure.hook, param=failure.param
            ) from error
        except BaseException as error:
            raise HookError(self._plan.name, hook, describe(error)) from error
        if isinstance(returned, LAZY):
            if isinstance(returned, Coroutine):
                returned.close()  # else Python warns that it was never awaited
            raise HookError(self._plan.name, hook, "is async or a generator; a hook is a plain function that returns")
        return returned

    def _as_payload(self, hook: str, returned: Any, like: StagePayload) -> StagePayload:
        if not isinstance(returned, StagePayload):
            return StagePayload(request=like.request, data=returned)
        if not isinstance(returned.request, OmniRequest):
            problem = f"returned a payload whose request is {type(returned.request).__name__}; expected an OmniRequest"
            raise HookError(self._plan.name, hook, problem)
        return returned
