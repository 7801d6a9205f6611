"""One sentence as a request of kind ``speech``, for the length of its sound. Called by `room` and `body`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from stage_runtime.coordinator.events import AnswerEvent, RequestManagerApi
from stage_runtime.web.exchanges.exchange import Exchange
from stage_runtime.web.reading.schemas import SpeechBody
from stage_runtime.web.spoken.script import Sentence
from stage_runtime.web.translating.audio import speaking


def spoken_body(sentence: Sentence) -> SpeechBody:
    """The sentence as a body of ``/v1/audio/speech``."""
    config = sentence.config
    return SpeechBody(
        input=sentence.text,
        voice=config.voice,
        instructions=config.instructions,
        response_format=config.format,
        speed=config.speed,
        seed=config.seed,
        temperature=config.temperature,
        metadata=config.metadata,
    )


async def sentence_events(
    manager: RequestManagerApi,
    exchange: Exchange,
    sentence: Sentence,
    request_id: str,
    timeout_s: float | None,
    watch: Callable[[Callable[[], object]], object] | None = None,
) -> AsyncGenerator[AnswerEvent, None]:
    """The events of one sentence. Its request ends with the generator.

    timeout_s: of the handshake's or request's header. watch: given what ends the request at once.
    Raises: RequestError.
    """
    request = speaking.request(spoken_body(sentence), request_id)
    limits = [limit for limit in (timeout_s, sentence.config.timeout) if limit is not None]
    within_s = min(limits, default=None)
    hook_result = await manager.call_terminal_stages(request, timeout_s=within_s)
    handle = manager.admit(
        request,
        timeout_s=within_s,
        trace=exchange.trace(),
        trace_state=exchange.trace_state(),
        hook_result=hook_result,
    )
    events = handle.events()
    try:
        if watch is not None:
            watch(lambda: handle.abort("the client disconnected"))
        async for event in events:
            yield event
    finally:
        handle.abort("the client does not listen any more")  # changes nothing when it is over
        if isinstance(events, AsyncGenerator):
            await events.aclose()
