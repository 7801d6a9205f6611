"""What a stage continues and what it gives out, where the author says nothing else; and prompts to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stage_runtime.api import Generation, Prompt
from stage_runtime.errors import InvalidRequest
from stage_runtime.wire.values import Chunk, Finish, Result, StagePayload, Text, Usage


def default_prompt(payload: StagePayload) -> Prompt:
    """The messages of a chat; else the text that the stage before sent, or the client."""
    request = payload.request
    messages = request.messages()
    data = payload.data
    if isinstance(data, str):
        return Prompt(text=data, params=request.params)
    if messages:
        return Prompt(messages=[_spoken(index, item) for index, item in enumerate(messages)], params=request.params)
    if isinstance(request.inputs, Mapping) and isinstance(request.inputs.get("tokens"), list):
        return Prompt(tokens=request.inputs["tokens"], params=request.params)
    text = request.last_text()
    if not text:
        raise InvalidRequest("inputs must be a text, or hold text, tokens or messages", param="inputs")
    return Prompt(text=text, params=request.params)


def _spoken(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for the chat template."""
    parts = message["content"]
    other = next((part["type"] for part in parts if part["type"] != "text"), None)
    if other is not None:
        raise InvalidRequest(f"messages[{index}] has a part of type {other!r}; this model takes text", param="messages")
    return {"role": message["role"], "content": "".join(str(part["text"]) for part in parts)}


def default_deliver(payload: StagePayload, generation: Generation) -> Iterator[Chunk | Result]:
    """Text in pieces, then token counts and why it ended."""
    if generation.text:
        yield Chunk(Text(generation.text))
    if generation.finish is not None:
        usage = Usage(generation.prompt_tokens, generation.completion_tokens)
        yield Result([usage, Finish(generation.finish)])


def size(prompt: Prompt) -> int:
    """About how many characters are to be encoded."""
    if prompt.tokens is not None:
        return len(prompt.tokens)
    return len(prompt.text or "") + sum(len(str(one.get("content", ""))) for one in prompt.messages or ())


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt.

    Raises: InvalidRequest: it is empty, or the template refuses the messages.
    """
    if prompt.tokens is not None:
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt.tokens):
            raise InvalidRequest("tokens must be whole numbers", param="inputs")
        tokens = list(prompt.tokens)
    elif prompt.messages is not None:
        tokens = _templated(prompt, tokenizer)
    else:
        tokens = [int(token) for token in tokenizer(prompt.text or "")["input_ids"]]
    if not tokens:
        raise InvalidRequest("the prompt is empty")
    return tokens


def _templated(prompt: Prompt, tokenizer: Any) -> list[int]:
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest("this model has no chat template: it continues text, not messages")
    try:
        encoded = tokenizer.apply_chat_template(
            list(prompt.messages or ()), add_generation_prompt=True, return_dict=True, **prompt.template
        )
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the model's chat template refuses the messages: {error}", param="messages") from error
    return [int(token) for token in encoded["input_ids"]]
