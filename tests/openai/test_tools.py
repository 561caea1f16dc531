"""Tools: chosen by the model, required, named, forbidden, and answered."""

import json

import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]

# The mock engine calls the tool that the last message names.
ASKS = [{"role": "user", "content": "Call get_weather for Oslo, please."}]
CHATS = [{"role": "user", "content": "Just say something about rivers."}]


def call_of(reply, stream):
    """Finish reason, id, name and arguments of the only call of a reply."""
    if not stream:
        choice = reply.choices[0]
        [call] = choice.message.tool_calls
        return choice.finish_reason, call.id, call.function.name, call.function.arguments
    deltas = [call for event in reply for call in event.choices[0].delta.tool_calls or []]
    name = "".join(delta.function.name or "" for delta in deltas)
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    return reply[-1].choices[0].finish_reason, deltas[0].id, name, arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "choice", "name", "finish_reason"),
    [
        (ASKS, "auto", "get_weather", "tool_calls"),
        (CHATS, "required", "get_weather", "tool_calls"),
        (CHATS, {"type": "function", "function": {"name": "get_time"}}, "get_time", "stop"),
    ],
    ids=["auto", "required", "named"],
)
def test_a_tool_is_called(asker, messages, choice, name, finish_reason, stream):
    reply = asker.chat(messages=messages, tools=TOOLS, tool_choice=choice, stream=stream)
    reason, call_id, called, arguments = call_of(reply, stream)
    assert (reason, called) == (finish_reason, name)
    assert call_id
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_without_need_or_leave_no_tool_is_called(asker, stream):
    for messages, choice in [(CHATS, "auto"), (ASKS, "none")]:
        reply = asker.chat(messages=messages, tools=TOOLS, tool_choice=choice, stream=stream)
        for one in reply if stream else [reply]:
            said = one.choices[0].delta if stream else one.choices[0].message
            assert not said.tool_calls


def test_tools_count_as_part_of_the_prompt(asker):
    bare = asker.chat(messages=CHATS).usage.prompt_tokens
    with_tools = asker.chat(messages=CHATS, tools=TOOLS).usage.prompt_tokens
    assert with_tools > bare + 50


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_a_tool_goes_back_into_the_conversation(asker, stream):
    first = asker.chat(messages=ASKS, tools=TOOLS)
    call = first.choices[0].message.tool_calls[0]
    messages = [
        *ASKS,
        first.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"celsius": -1.50})},
    ]
    second = asker.chat(messages=messages, tools=TOOLS, stream=stream)
    if not stream:
        assert second.choices[0].message.content
        assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_two_choices_each_call_a_tool(asker):
    for stream in (False, True):
        reply = asker.unsplit_chat(messages=ASKS, tools=TOOLS, n=2, parallel_tool_calls=False, stream=stream)
        if not stream:
            assert all(choice.message.tool_calls for choice in reply.choices)


def test_the_clients_own_stream_helper_parses_the_arguments(client):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(model="mock", messages=ASKS, tools=[strict]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)
    [call] = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments["unit"] == "C"
