"""Completions: prompts of text and of token ids, alone and in batches, on both paths."""

import openai
import pytest

from fleet import post
from same import REMOTE, text_of

TEXT = "Requests arrive, prompts are computed, tokens leave. " * 8


@pytest.fixture(scope="module")
def ids(fleet):
    """The text's token ids."""
    return post(f"{fleet.engines[0].url}/tokenize", {"prompt": TEXT})["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_of_a_text_is_the_same(asker, stream):
    reply = asker.completion(prompt=TEXT, stream=stream)
    assert text_of(reply) if stream else reply.choices[0].text


def test_without_a_limit_a_completion_has_16_tokens(asker):
    reply = asker.completion(prompt=TEXT, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_the_same_prompt(asker, ids, stream):
    by_text = asker.completion(prompt=TEXT, stream=stream)
    by_ids = asker.completion(prompt=ids, stream=stream)
    if stream:
        assert text_of(by_ids) == text_of(by_text)
    else:
        assert by_ids.choices[0].text == by_text.choices[0].text
        assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens == len(ids)


def batches(ids):
    return {
        "texts": [TEXT, "Something else.", TEXT],
        "ids": [ids, ids[:20], ids[5:]],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_a_batch_is_answered_on_the_local_path(asker, ids, kind, stream):
    batch = batches(ids)[kind]
    reply = asker.unsplit_completion(prompt=batch, stream=stream)
    if stream:
        assert all(text_of(reply, index) for index in range(len(batch)))
    else:
        assert [choice.index for choice in reply.choices] == list(range(len(batch)))


@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_a_batch_cannot_be_sent_the_remote_way(client, ids, kind):
    with pytest.raises(openai.BadRequestError, match="cannot be split"):
        client.completions.create(
            model="mock", prompt=batches(ids)[kind], extra_headers={"x-pointsman-path": REMOTE}
        )


def test_a_batch_without_a_wish_goes_local_and_says_why(client, ids):
    raw = client.completions.with_raw_response.create(model="mock", prompt=[ids, ids])
    assert raw.headers["x-pointsman-path"] == "local"
    assert raw.headers["x-pointsman-reason"] == "batch"
    assert len(raw.parse().choices) == 2


def test_a_batch_of_one_is_no_batch(asker, ids):
    for prompt in ([TEXT], [ids]):
        asker.completion(prompt=prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_through(asker, stream):
    reply = asker.completion(prompt=TEXT, logprobs=3, max_tokens=9, stream=stream)
    events = reply if stream else [reply]
    tokens = [token for event in events for token in event.choices[0].logprobs.tokens]
    assert len(tokens) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_two_answers(asker, stream):
    reply = asker.unsplit_completion(prompt=TEXT, n=2, stream=stream)
    if stream:
        texts = [text_of(reply, index) for index in range(2)]
    else:
        texts = [choice.text for choice in reply.choices]
    assert len(set(texts)) == 2


def test_a_batch_with_two_choices_each(asker):
    reply = asker.unsplit_completion(prompt=["one", "two"], n=2)
    assert len({choice.text for choice in reply.choices}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_echoed_if_asked(asker, stream):
    reply = asker.completion(prompt=TEXT, echo=True, stream=stream)
    assert (text_of(reply) if stream else reply.choices[0].text).startswith(TEXT)


def test_an_echo_with_log_probabilities_is_not_split(asker, client):
    asker.unsplit_completion(prompt=TEXT, echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="cannot be split"):
        client.completions.create(
            model="mock",
            prompt=TEXT,
            echo=True,
            logprobs=1,
            extra_headers={"x-pointsman-path": REMOTE},
        )


def test_usage_comes_at_the_end_of_a_stream_that_asks_for_it(asker):
    events = asker.completion(prompt=TEXT, stream=True, stream_options={"include_usage": True})
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens > 0


def test_stop_seed_and_adapter(asker):
    words = asker.completion(prompt=TEXT).choices[0].text.split()
    stop = next(word for word in words[4:] if word not in " ".join(words[:4]))
    assert asker.completion(prompt=TEXT, stop=stop).choices[0].finish_reason == "stop"
    said = [asker.completion(prompt=TEXT, seed=seed).choices[0].text for seed in (1, 2, 1)]
    assert said[0] == said[2] != said[1]
    assert asker.completion(prompt=TEXT, model="mock-lora").model == "mock-lora"


def test_token_ids_of_prompt_and_answer_are_given_back_if_asked(asker, ids):
    for stream in (False, True):
        reply = asker.completion(prompt=ids, stream=stream, extra_body={"return_token_ids": True})
        choice = (reply[0] if stream else reply).choices[0]
        assert choice.prompt_token_ids == ids
