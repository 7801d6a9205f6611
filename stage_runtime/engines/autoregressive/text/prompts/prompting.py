"""The input and output of a stage where the author gives nothing else; and prompts to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stage_runtime.api import Generation, Prompt
from stage_runtime.engines.autoregressive.text.prompts import template_messages
from stage_runtime.engines.autoregressive.text.prompts.controls import TextEncoder
from stage_runtime.engines.autoregressive.text.prompts.prompt_rows import ROW
from stage_runtime.engines.autoregressive.text.structured_output.grammar_texts import Grammar
from stage_runtime.engines.autoregressive.text.tool_calls import tools
from stage_runtime.engines.autoregressive.text.tool_calls.call_forms import FORMS, CallForm
from stage_runtime.errors import InvalidRequest, RequestError
from stage_runtime.wire.outputs import PROMPT_TOKEN_IDS, TOKEN_IDS
from stage_runtime.wire.values import Chunk, Finish, Note, Reasoning, Result, StagePayload, Text, Usage

LONG: Final = 8_000  # characters of a prompt that is encoded apart: more would take milliseconds of a step
LONG_GRAMMAR: Final = 2_000  # as `LONG`: characters that are compiled, for each of ``n`` answers
_ALWAYS: Final[dict[str, Any]] = {"add_generation_prompt": True}
#: Arguments of transformers' method that are not the template's.
_OURS: Final = frozenset(
    {*_ALWAYS, "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages",
     "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize",
     "tokenizer_kwargs", "tools", "truncation"}
)  # fmt: skip


def default_prompt(payload: StagePayload) -> Prompt:
    """The messages of a chat; else the text that the stage before sent, or the client."""
    request = payload.request
    chat = request.messages()
    data = payload.data
    if isinstance(data, str):
        return Prompt(text=data, literal=True, params=request.params)
    if chat:
        tools.check_arguments(chat)
        spoken = [_spoken(index, item) for index, item in enumerate(chat)]
        template = {**_template(request.params), **_continuing(request.params, spoken)}
        if offered := tools.offered(request.params):
            template["tools"] = offered
        return Prompt(messages=spoken, params=request.params, template=template, **_served(request.params))
    if isinstance(request.inputs, Mapping) and isinstance(request.inputs.get("tokens"), list):
        return Prompt(tokens=request.inputs["tokens"], params=request.params, **_served(request.params))
    text = request.last_text()
    if not text:
        raise InvalidRequest("inputs must be a text, or hold text, tokens or messages", param="inputs")
    # A completion's client writes the whole prompt, and could as well send its tokens.
    return Prompt(text=text, literal=request.kind != "completion", params=request.params, **_served(request.params))


def checked(given: Any) -> Prompt:
    """The prompt that an author's ``prompt`` has returned. Raises: TypeError: it is something else, or made of it."""
    if not isinstance(given, Prompt):
        raise TypeError(f"prompt returned {type(given).__name__}; expected omni.Prompt")
    wanted = (("text", given.text, str), ("params", given.params, Mapping), ("template", given.template, Mapping))
    for name, value, kind in wanted:
        if value is not None and not isinstance(value, kind):
            words = "a str" if kind is str else "a dict"
            raise TypeError(f"prompt returned omni.Prompt({name}=…): expected {words}, got {type(value).__name__}")
    messages = () if given.messages is None else given.messages
    if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) for one in messages):
        raise TypeError("prompt returned omni.Prompt(messages=…): expected a list of dicts")
    return given


def delivered(given: Any) -> Iterable[Chunk | Result]:
    """The parts that an author's ``deliver`` has returned. Raises: TypeError: it is not a generator, list or alike."""
    if not isinstance(given, Iterable):
        problem = f"deliver returned {type(given).__name__}; expected an iterable of omni.Chunk and omni.Result"
        raise TypeError(f"{problem}, [] for none")
    return given


def no_prompt(payload: StagePayload) -> Prompt:
    """All of it comes by a stream."""
    return Prompt(parts=())


def _spoken(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A client's message for the chat template: what of it templates read, or some of them."""
    names = ("name", "tool_call_id", "tool_calls", "reasoning_content")
    kept = {name: message[name] for name in names if message.get(name)}
    role = message.get("role")
    if not isinstance(role, str):  # a pipeline's client writes anything
        raise InvalidRequest(f"messages[{index}].role: expected a text", param="messages")
    return _readable(index, {"role": role, "content": message["content"], **kept})


def _readable(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a text as content, and with calls whose arguments are objects. Others stay as they are."""
    found = template_messages.as_text(message, index)
    calls = found.get("tool_calls")
    if not calls:
        return found
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"messages[{index}].tool_calls: no calls of functions", param="messages")
    read = [call if _is_read(call) else tools.spoken(call, index, number) for number, call in enumerate(calls)]
    return {**found, "tool_calls": read}


def _is_read(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping)


def _template(params: Mapping[str, Any]) -> Mapping[str, Any]:
    given = params.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise InvalidRequest("chat_template_kwargs must be an object of names", param="chat_template_kwargs")
    refused = sorted(set(given) & _OURS)
    if refused:
        raise InvalidRequest(f"chat_template_kwargs: {refused[0]} cannot be set", param="chat_template_kwargs")
    return given


def _continuing(params: Mapping[str, Any], chat: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The template's options for the last message: the answer continues it, or no answer is begun."""
    begins = params.get("add_generation_prompt")
    if params.get("continue_final_message") is not True:
        return {} if begins is None else {"add_generation_prompt": begins is True}
    place = "continue_final_message"
    if begins is True:
        raise InvalidRequest(f"{place}: expected add_generation_prompt to be false beside it, got true", param=place)
    last = chat[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        problem = f"expected the last message to be an assistant's text, got one of the role {last['role']!r}"
        if last["role"] == "assistant":
            problem = "expected the last message to be an assistant's text, got one without text or with calls"
        raise InvalidRequest(f"{place}: {problem}", param=place)
    return {"continue_final_message": True, "add_generation_prompt": False}


def _served(params: Mapping[str, Any]) -> dict[str, Any]:
    """How the engine is to serve the request: fields of `Prompt`."""
    found = {name: params[name] for name in ("cache_salt", "priority") if params.get(name) is not None}
    if not isinstance(found.get("cache_salt", ""), str):
        raise InvalidRequest("cache_salt: expected a text", param="cache_salt")
    return found


def default_deliver(payload: StagePayload, generation: Generation) -> Iterator[Chunk | Result]:
    """Text in pieces and calls of tools, then token counts and why it ended."""
    choice = generation.choice
    if generation.prompt_logprobs and choice == 0:
        yield Chunk(Note("prompt_logprobs", [_shown(one) for one in generation.prompt_logprobs]))
    if generation.echo is not None:
        yield Chunk(generation.echo)
    ids = list(_token_ids(payload, generation))
    if generation.reasoning:
        yield Chunk(Reasoning(generation.reasoning, choice))
    if generation.text or generation.shown_logprobs:
        text = Text(generation.text, choice, generation.shown_logprobs)
        yield Chunk([*ids, text] if ids else text)
    elif ids:
        yield Chunk(ids)
    for call in generation.tool_calls:
        yield Chunk(call)
    if generation.finish is not None:
        # All choices have the same prompt.
        prompt_tokens, cached_tokens = (0, 0) if choice else (generation.prompt_tokens, generation.cached_tokens)
        counts = (prompt_tokens, generation.completion_tokens, cached_tokens)
        end = [Usage(*counts, reasoning_tokens=generation.reasoning_tokens), Finish(generation.finish, choice)]
        yield Result(end) if generation.ends else Chunk(end)


def _token_ids(payload: StagePayload, generation: Generation) -> Iterator[Note]:
    """vLLM's ``return_token_ids``, as notes that routes give their places."""
    if payload.request.params.get("return_token_ids") is not True:
        return
    if generation.prompt_token_ids:
        yield Note(PROMPT_TOKEN_IDS, {"choice": generation.choice, "token_ids": list(generation.prompt_token_ids)})
    if generation.tokens:
        yield Note(TOKEN_IDS, {"choice": generation.choice, "token_ids": list(generation.tokens)})


def _shown(one: tuple[float, tuple[tuple[int, float], ...]]) -> dict[str, Any]:
    logprob, top = one
    return {"logprob": logprob, "top_logprobs": [{"token_id": token, "logprob": other} for token, other in top]}


def is_long(prompt: Prompt, grammar: Grammar | None, count: int) -> bool:
    """Whether encoding it, or compiling the grammar of ``count`` answers, would take milliseconds of a step."""
    return size(prompt) > LONG or (grammar is not None and grammar.size * count > LONG_GRAMMAR)


def size(prompt: Prompt) -> int:
    """The number of characters to encode, roughly."""
    if prompt.tokens is not None or prompt.parts is not None:
        return 0 if prompt.tokens is None else len(prompt.tokens)
    of_messages = sum(len(str(value)) for one in prompt.messages or () for value in one.values())
    return len(prompt.text or "") + of_messages + len(str(prompt.template))


def encode(
    prompt: Prompt, encoder: TextEncoder, *, whole: bool = True, form: CallForm = FORMS["hermes"]
) -> tuple[list[int], Any]:
    """Token ids of a prompt, and the rows of those that are `prompt_rows.ROW`; None: the prompt has none.

    whole: nothing more will come, so it must not be empty. form: in which the model calls tools.
    Raises: InvalidRequest: it is empty, or the template refuses the messages.
    """
    embeds = None
    if prompt.parts is not None:
        tokens, embeds = joined(prompt.parts)
    elif prompt.tokens is not None:
        tokens = _whole(prompt.tokens)
    elif prompt.messages is not None:
        tokens = _templated(prompt, encoder, form)
    else:
        tokens = encoder.text(prompt.text or "", literal=prompt.literal)
    if whole and not tokens:
        raise InvalidRequest("the prompt is empty")
    return tokens, embeds


def _whole(tokens: Sequence[Any]) -> list[int]:
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            cure = "" if isinstance(tokens, list | tuple) else f": use .tolist() of the {type(tokens).__name__}"
            problem = f"tokens must be whole numbers, and one is of type {type(token).__name__}{cure}"
            raise InvalidRequest(problem, param="inputs")
    return list(tokens)


def joined(parts: Sequence[Any]) -> tuple[list[int], Any]:
    """Token ids and tensors as the ids with `ROW`s, and one tensor; None: no part is one. Raises: InvalidRequest."""
    import torch

    tokens: list[int] = []
    tensors = []
    for part in parts:
        if not isinstance(part, torch.Tensor):
            tokens += _whole(part)
            continue
        if part.ndim != 2:
            raise InvalidRequest(f"embeddings have the shape {list(part.shape)}; expected [tokens, hidden]")
        tokens += [ROW] * len(part)
        tensors.append(part)
    if len({(one.shape[1], one.dtype, one.device) for one in tensors}) > 1:
        raise InvalidRequest("the embeddings of one prompt must have one dtype and one size of rows")
    return tokens, torch.cat(tensors) if tensors else None


def _templated(prompt: Prompt, encoder: TextEncoder, form: CallForm) -> list[int]:
    import jinja2

    known = str(encoder.template or "")
    if not known:
        raise RequestError(
            "stage_failed",
            "the stage's model has no chat template, so it cannot answer messages: give omni.Autoregressive a prompt "
            "that returns omni.Prompt(text=…)",
        )
    tools.check_arguments(prompt.messages or ())
    chat = [_readable(index, one) for index, one in enumerate(prompt.messages or ())]
    if "developer" not in known:  # many templates leave messages of roles that they do not know out, without an error
        chat = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in chat]
    template = {**_ALWAYS, **prompt.template}
    offered = template.get("tools")
    if offered and "tools" not in known:
        del template["tools"]
        chat = [{"role": "system", "content": tools.instructions(offered, form.sample)}, *chat]
    try:
        return encoder.chat(encoder.form(template).arrange(chat), template)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the model's chat template refuses the messages: {error}", param="messages") from error
    except RecursionError as error:
        problem = "the messages, the tools or the arguments of the chat template are nested too deeply"
        raise InvalidRequest(problem, param="messages") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # of what a client has put into messages
        raise InvalidRequest(f"the messages do not fit the model's chat template: {error}", param="messages") from error
