"""Chats, streaming and not, on both paths."""

import pytest

from same import text_of

TALK = [
    {"role": "system", "content": "You answer in plain words."},
    {"role": "user", "content": "Which way does a request go when its prompt is long and cold?"},
]

# Long enough for a hundred KV blocks, each unlike the others.
LONG = [{"role": "user", "content": " ".join(f"item {number} of the list," for number in range(300))}]


@pytest.mark.parametrize("messages", [TALK, LONG], ids=["short", "long"])
def test_a_chat_is_the_same(asker, messages):
    reply = asker.chat(messages=messages)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("messages", [TALK, LONG], ids=["short", "long"])
def test_a_streamed_chat_is_the_same_and_says_what_the_whole_one_says(asker, messages):
    whole = asker.chat(messages=messages)
    events = asker.chat(messages=messages, stream=True)
    assert text_of(events) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(event.usage is None for event in events)


def test_usage_comes_at_the_end_of_a_stream_that_asks_for_it(asker):
    whole = asker.chat(messages=TALK)
    events = asker.chat(messages=TALK, stream=True, stream_options={"include_usage": True})
    last = events[-1]
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(event.usage is None for event in events[:-1])


def test_usage_comes_with_each_event_of_a_stream_that_asks_for_it(asker):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = asker.chat(messages=TALK, stream=True, stream_options=options)
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["max_completion_tokens", "max_tokens"])
def test_a_limit_on_the_answer_is_kept_on_both_paths(asker, limit, stream):
    reply = asker.chat(messages=TALK, stream=stream, logprobs=True, **{limit: 7})
    if stream:
        tokens = [token for event in reply for token in tokens_of(event.choices[0])]
        finish_reason = reply[-1].choices[0].finish_reason
    else:
        tokens = tokens_of(reply.choices[0])
        finish_reason = reply.choices[0].finish_reason
        assert reply.usage.completion_tokens == 7
    assert len(tokens) == 7
    assert finish_reason == "length"


def tokens_of(choice):
    return choice.logprobs.content if choice.logprobs else []


def test_an_answer_of_a_single_token_can_be_asked_for(asker):
    # As many as the prefill leg generates for itself.
    for stream in (False, True):
        asker.chat(messages=TALK, max_completion_tokens=1, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_two_answers(asker, stream):
    reply = asker.unsplit_chat(messages=TALK, n=2, stream=stream)
    if stream:
        texts = [text_of(reply, index) for index in range(2)]
    else:
        texts = [choice.message.content for choice in reply.choices]
        assert [choice.index for choice in reply.choices] == [0, 1]
    assert len(set(texts)) == 2 and all(texts)


def test_a_stream_of_two_choices_ends_with_the_usage_of_both(asker):
    whole = asker.unsplit_chat(messages=TALK, n=2)
    options = {"include_usage": True}
    events = asker.unsplit_chat(messages=TALK, n=2, stream=True, stream_options=options)
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_log_probabilities_come_through(asker, top, stream):
    reply = asker.chat(messages=TALK, logprobs=True, top_logprobs=top, stream=stream)
    events = reply if stream else [reply]
    tokens = [token for event in events for token in tokens_of(event.choices[0])]
    assert tokens
    assert {len(token.top_logprobs) for token in tokens} == {top}
    assert all(token.logprob < 0 for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(asker, stream):
    words = asker.chat(messages=TALK).choices[0].message.content.split()
    # Found only after the first token, at which a prefill leg would stop.
    stop = next(word for word in words[4:] if word not in " ".join(words[:4]))
    reply = asker.chat(messages=TALK, stop=[stop, "no such word"], stream=stream)
    text = text_of(reply) if stream else reply.choices[0].message.content
    choice = (reply[-1] if stream else reply).choices[0]
    assert stop not in text
    assert text.strip()
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_a_stop_string_at_the_first_token_ends_it_there_on_both_paths(asker):
    first = asker.chat(messages=TALK, max_tokens=1).choices[0].message.content
    reply = asker.chat(messages=TALK, stop=first)
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].finish_reason == "stop"


def test_a_seed_names_an_answer(asker):
    said = [asker.chat(messages=TALK, seed=seed).choices[0].message.content for seed in (1, 2, 1)]
    assert said[0] == said[2] != said[1]


def test_an_adapter_answers_under_its_own_name(asker):
    for stream in (False, True):
        reply = asker.chat(messages=TALK, model="mock-lora", stream=stream)
        assert {one.model for one in (reply if stream else [reply])} == {"mock-lora"}


def test_every_other_parameter_of_the_client_is_taken(asker):
    asker.chat(
        messages=TALK,
        frequency_penalty=0.10,
        presence_penalty=-1.0,
        temperature=1e-7,
        top_p=0.999999,
        logit_bias={"11": -100.0},
        user="someone",
        metadata={"ticket": "1"},
        store=False,
        response_format={"type": "json_object"},
        extra_body={"top_k": 40, "min_p": 0.0, "repetition_penalty": 1.0, "unheard_of": [1.50, None]},
    )


def test_the_clients_own_stream_helper_puts_the_answer_together(asker, client):
    whole = asker.chat(messages=TALK)
    with client.chat.completions.stream(model="mock", messages=TALK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_a_conversation_grows(asker):
    messages = list(TALK)
    for turn in range(4):
        answer = asker.chat(messages=messages).choices[0].message.content
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"And what comes after that, in step {turn}?"},
        ]
