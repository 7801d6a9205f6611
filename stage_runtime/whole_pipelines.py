"""A whole pipeline in an author's test: `omni.testing.run_pipeline` and `omni.testing.chat`.

The pipeline runs as `omni up` runs it, as processes of this machine, and is asked over HTTP. Its event loop has its own
thread, so that tests need not be async. It is for authors, by way of `testing`; nothing of ours imports it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from stage_runtime.errors import RequestError
from stage_runtime.processes.one_machine.local import LocalOptions, LocalPipeline
from stage_runtime.processes.supervision.startup_failures import StartupFailed

PATIENCE_S: Final = 300.0  # of a request


class Answer(msgspec.Struct, frozen=True):
    """The answer of a chat. whole: the JSON of /v1/chat/completions."""

    text: str
    finish: str
    tool_calls: list[dict[str, Any]]
    usage: dict[str, Any]
    whole: dict[str, Any]


class RunningPipeline:
    """A pipeline that is up."""

    def __init__(self, url: str, logs: Sequence[str]) -> None:
        self.url = url
        self.logs = logs  #: Lines that its processes have written so far: ``process | line``.

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON body to a route that answers with JSON.

        Raises: RequestError: it was refused, or failed; as a client is told. TypeError: it answers with something else.
        """
        import httpx

        answer = httpx.post(f"{self.url}{path}", json=dict(body), timeout=PATIENCE_S, trust_env=False)
        form = answer.headers.get("content-type", "")
        if not form.startswith("application/json"):
            raise TypeError(f"POST {path} answers with {form or 'nothing'}: send it to {self.url} by an HTTP client")
        found: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            raise _as_raised(found.get("error", {}), answer.headers.get("retry-after"))
        return found

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **parameters: Any) -> Answer:
        """messages: those of a chat, or what the user says. parameters: fields of the body. Raises: as `post`."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        whole = self.post("/v1/chat/completions", {"messages": said, **parameters})
        choice = whole["choices"][0]
        message = choice["message"]
        return Answer(
            message["content"] or "", choice["finish_reason"], message.get("tool_calls", []), whole["usage"], whole
        )

    def ask(self, inputs: Any, **fields: Any) -> dict[str, Any]:
        """Results by terminal stage, of /v1/pipeline. Raises: as `post`."""
        results: dict[str, Any] = self.post("/v1/pipeline", {"inputs": inputs, **fields})["results"]
        return results


def _as_raised(error: Mapping[str, Any], retry_after: str | None) -> RequestError:
    """The error that a client was told."""
    return RequestError(
        str(error.get("code")),
        str(error.get("message")),
        stage=error.get("stage"),
        hook=error.get("hook"),
        request_id=error.get("request_id"),
        param=error.get("param"),
        retry_after_s=None if retry_after is None else float(retry_after),
    )


@contextmanager
def run_pipeline(
    file: str | os.PathLike[str], *, overrides: Sequence[str] = (), cpu: bool = True
) -> Iterator[RunningPipeline]:
    """Run a pipeline, at a free port, as long as the block lasts.

    file: as of ``omni up -f``. overrides: as of ``--set``. cpu: ignore GPU ids.
    Raises: SpecError, ConfigurationError: it is wrong. StartupFailed: a process did not get ready; a note has the
        traceback, or the end of its output.
    """
    logs: list[str] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pipeline", daemon=True)
    thread.start()

    def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            asyncio.run_coroutine_threadsafe(_all_ended(), loop).result()
            raise

    async def made() -> LocalPipeline:
        options = LocalOptions(port=0, cpu=cpu, no_auth=True)
        return LocalPipeline(
            file, overrides=overrides, options=options, on_line=lambda name, line: logs.append(f"{name} | {line}")
        )

    try:
        pipeline: LocalPipeline = wait(made())
        wait(pipeline.start())
        try:
            yield RunningPipeline(pipeline.url, logs)
        except BaseException as error:
            wait(pipeline.__aexit__(type(error), error, error.__traceback__))
            raise
        wait(pipeline.stop())
    except StartupFailed as failure:
        if failure.details:
            failure.add_note(failure.details)
        raise
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _all_ended() -> None:
    """Wait for all other tasks of this event loop, which were cancelled or end with those."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


def chat(file: str | os.PathLike[str], messages: str | Sequence[Mapping[str, Any]], **parameters: Any) -> Answer:
    """Run a pipeline for one chat. The same as `run_pipeline` and `RunningPipeline.chat`."""
    with run_pipeline(file) as running:
        return running.chat(messages, **parameters)
