"""Each error is the class that people catch, and an engine's own words pass unchanged."""

import openai
import pytest

from fleet import MAX_MODEL_LEN
from same import BOTH, LOCAL, REMOTE

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Say something long, please."}]}


def by(path):
    return {"x-pointsman-path": path}


def test_an_unknown_model_is_not_found(client):
    for create, request in [
        (client.chat.completions.create, {"messages": CHAT["messages"]}),
        (client.completions.create, {"prompt": "text"}),
    ]:
        with pytest.raises(openai.NotFoundError, match="nobody") as caught:
            create(model="nobody", **request)
        assert caught.value.param == "model"
        assert caught.value.type == "NotFoundError"


BAD = {
    "temperature": {"temperature": -1},
    "max_tokens": {"max_tokens": 0},
    "n": {"n": 0},
    "stop": {"stop": ["a", "b", "c", "d", "e"]},
    "type": {"extra_body": {"max_tokens": "many"}},
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_what_the_engine_refuses_is_refused_in_its_own_words(client, engines, path, wrong):
    with pytest.raises(openai.BadRequestError) as through:
        client.chat.completions.create(**CHAT, **wrong, extra_headers=by(path))
    with pytest.raises(openai.BadRequestError) as alone:
        engines["decode-0"].chat.completions.create(**CHAT, **wrong)
    assert through.value.body == alone.value.body


@pytest.mark.parametrize("path", BOTH)
def test_a_prompt_beyond_the_context_is_refused_in_the_engines_own_words(client, engines, path):
    prompt = [7] * MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError, match="context length") as through:
        client.completions.create(model="mock", prompt=prompt, extra_headers=by(path))
    with pytest.raises(openai.BadRequestError) as alone:
        engines["decode-0"].completions.create(model="mock", prompt=prompt)
    assert through.value.body == alone.value.body


def test_a_wish_for_a_path_that_there_is_not_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="must be `local` or `remote`"):
        client.chat.completions.create(**CHAT, extra_headers=by("sideways"))


def test_a_body_that_is_no_json_is_refused(client):
    with pytest.raises(openai.BadRequestError):
        client.post("/completions", cast_to=object, content=b'{"model": "mock", ')


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, openai.AuthenticationError), (403, openai.PermissionDeniedError)],
)
def test_an_engine_that_lets_nobody_in_says_so(client, faults, path, status, kind):
    faults({"fault": "status", "status": status})
    with pytest.raises(kind, match="fault injected"):
        client.chat.completions.create(**CHAT, extra_headers=by(path))


def test_a_full_router_says_so_and_when_to_come_back(fleet, faults):
    narrow = fleet.router(fleet.directory, limits={"max_in_flight": 1, "retry_after": "3s"})
    faults({"fault": "slow_tokens", "delay_ms": 20})
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="unused", max_retries=0) as client:
        with client.chat.completions.create(**CHAT, stream=True) as running:
            assert next(running).choices
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(**CHAT)
            assert caught.value.response.headers["retry-after"] == "3"
            assert "1 requests in flight" in caught.value.message


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(("path", "leg"), [(REMOTE, "decode"), (LOCAL, "local")])
def test_a_stream_that_breaks_ends_with_an_error_and_not_silently(client, faults, path, leg, api):
    faults({"leg": leg, "fault": "cut_mid_stream", "after_tokens": 3})
    if api == "chat":
        stream = client.chat.completions.create(**CHAT, stream=True, extra_headers=by(path))
    else:
        prompt = "Say something long, please."
        stream = client.completions.create(
            model="mock", prompt=prompt, stream=True, extra_headers=by(path)
        )
    said = ""
    with stream, pytest.raises(openai.APIError, match="broke off") as caught:
        for event in stream:
            choice = event.choices[0]
            said += (choice.delta.content or "") if api == "chat" else choice.text
    # The three tokens that had come have reached the client.
    assert len(said.split()) >= 3
    assert type(caught.value) is openai.APIError
    assert caught.value.body["code"] == 502


def test_a_reply_that_never_begins_times_out_at_the_client_and_leaves_nothing(client, faults):
    for path in BOTH:
        faults({"fault": "hang_before_headers", "count": 1})
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(
                **CHAT, extra_headers=by(path)
            )


@pytest.mark.parametrize("path", BOTH)
def test_a_client_that_leaves_mid_stream_leaves_nothing(client, faults, path):
    faults({"fault": "slow_tokens", "delay_ms": 100})
    stream = client.chat.completions.create(**CHAT, stream=True, extra_headers=by(path))
    with stream:
        for _ in range(3):
            next(stream)
    # What was running, booked or pinned must end with it: see `nothing_is_left_behind`.
