"""The script that `test_other_clients` runs in an environment of its own: clients of others, against one server.

Usage: other_clients_script.py NAME URL. It imports nothing of ours; it fails by an exception.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def realtime(url: str) -> None:
    """The official client's own events, typed as it has them."""
    from openai import AsyncOpenAI

    async def talk() -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        async with client, client.realtime.connect(model="m") as session:
            audio: Any = {"input": {"turn_detection": None}}
            given: Any = {"type": "realtime", "output_modalities": ["text"], "audio": audio}
            await session.session.update(session=given)
            for _turn in range(2):
                said: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
                await session.conversation.item.create(item=said)
                await session.response.create()
                pieces = []
                async for event in session:
                    assert event.type != "error", event
                    if event.type == "response.output_text.delta":
                        pieces.append(event.delta)
                    if event.type == "response.done":
                        assert event.response.status == "completed", event
                        break
                assert "".join(pieces) == "hello", pieces

    asyncio.run(talk())


def litellm(url: str) -> None:
    import litellm as client  # type: ignore[import-not-found, unused-ignore]

    given: dict[str, Any] = {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none"}
    said = [{"role": "user", "content": "hi"}]
    whole = client.completion(messages=said, **given)
    assert whole.choices[0].message.content == "hello", whole
    assert whole.usage.completion_tokens == 2, whole
    pieces = [one.choices[0].delta.content or "" for one in client.completion(messages=said, stream=True, **given)]
    assert "".join(pieces) == "hello", pieces
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    called = client.completion(messages=said, tools=tools, **given).choices[0].message.tool_calls[0].function
    assert (called.name, called.arguments) == ("weather", "{}"), called
    response = client.responses(input="hi", **given)
    assert response.output[0].content[0].text == "hello", response
    try:
        client.completion(messages=said, temperature=1.5, top_p=2, **given)
    except client.BadRequestError as error:
        assert "top_p" in str(error), error
    else:
        raise AssertionError("not refused")


def langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found, unused-ignore]
    from langchain_core.tools import tool  # type: ignore[import-not-found, unused-ignore]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found, unused-ignore]

    @tool  # type: ignore[untyped-decorator, unused-ignore]
    def weather() -> str:
        """The weather."""
        return "sunny"

    for responses in (False, True):
        model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="m", use_responses_api=responses)
        assert model.invoke("hi").text == "hello"
        assert "".join(one.text for one in model.stream("hi")) == "hello"
        armed = model.bind_tools([weather])
        first = armed.invoke("hi")
        [call] = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {}), first
        last = armed.invoke([HumanMessage("hi"), first, ToolMessage("sunny", tool_call_id=call["id"])])
        assert last.text == "it is sunny", last


def agents(url: str) -> None:
    from agents import (  # type: ignore[import-not-found, unused-ignore]
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
    )
    from openai import AsyncOpenAI

    @function_tool  # type: ignore[untyped-decorator, unused-ignore]
    def weather() -> str:
        """The weather."""
        return "sunny"

    async def asked(kind: Any) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = kind(model="m", openai_client=client)
            agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
            assert (await Runner.run(agent, "hi")).final_output == "it is sunny"
            streamed = Runner.run_streamed(agent, "hi")
            events = [event.type async for event in streamed.stream_events()]
            assert streamed.final_output == "it is sunny" and "raw_response_event" in events

    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asyncio.run(asked(kind))


if __name__ == "__main__":
    {"litellm": litellm, "langchain": langchain, "agents": agents, "realtime": realtime}[sys.argv[1]](sys.argv[2])
