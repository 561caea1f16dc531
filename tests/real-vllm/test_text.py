"""The same text as from the engine alone, on both paths, which its own counters prove to be taken."""

import json

import pytest

from prompts import PATHS, of
from wire import send

LOCAL, REMOTE = "local", "remote"


def gained(engine, before):
    return {k: v - before.get(k, 0) for k, v in engine.sources().items() if v != before.get(k, 0)}


def alone(fleet, path, body, answer):
    """The engine that answered, asked by itself, with nothing in its cache."""
    engine = fleet.engine(answer.worker)
    engine.forget()
    return send(engine.url, path, body)


def without_names(reply: dict) -> dict:
    """The members of a reply that have to be equal."""
    kept = {k: v for k, v in reply.items() if k not in ("id", "created")}
    if kept.get("usage"):
        kept["usage"] = {**kept["usage"], "prompt_tokens_details": None}
    return kept


@pytest.mark.parametrize("way", [REMOTE, LOCAL])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", PATHS)
def test_the_text_is_that_of_the_engine_alone(fleet, router, api, stream, way):
    body = of(api, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    before = {engine.name: engine.sources() for engine in fleet.engines}
    answer = router.send(PATHS[api], body, path=way)
    assert (answer.status, answer.path, answer.reason) == (200, way, "override")
    took = {engine.name: gained(engine, before[engine.name]) for engine in fleet.engines}
    expected = alone(fleet, PATHS[api], body, answer)
    assert answer.text == expected.text and answer.text
    replies = (answer, expected)
    if stream:
        assert answer.is_done
        ours, theirs = ([without_names(chunk) for chunk in reply.chunks] for reply in replies)
        assert joined(ours) == joined(theirs)
        usage = answer.chunks[-1]["usage"]
    else:
        ours, theirs = (without_names(reply.json) for reply in replies)
        # The engine says where the KV came from.
        assert ours.pop("kv_transfer_params", None) is theirs.pop("kv_transfer_params", None)
        assert ours == theirs
        usage = answer.json["usage"]
    proves(took, way, answer.worker, usage["prompt_tokens"])


def joined(chunks):
    """What a stream says, however it is cut into events."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return ends, usage, sorted({key for chunk in chunks for key in chunk})


def proves(took, way, decoder, prompt_tokens):
    """The engines' own counters: who computed the prompt, and who fetched it."""
    if way == LOCAL:
        assert took == {"p": {}, decoder: {"local_compute": prompt_tokens}, other(decoder): {}}
        return
    assert took["p"] == {"local_compute": prompt_tokens}
    assert took[other(decoder)] == {}
    # A decode engine computes the last token again, to have something to start from.
    assert took[decoder]["external_kv_transfer"] >= prompt_tokens - 1
    assert sum(took[decoder].values()) == prompt_tokens


def other(decoder):
    return {"d1": "d2", "d2": "d1"}[decoder]


@pytest.mark.parametrize("way", [REMOTE, LOCAL])
def test_a_prompt_of_ids_is_as_good_as_its_text(fleet, router, way):
    text = of("completions")
    ids = send(fleet.d1.url, "/tokenize", {"model": text["model"], "prompt": text["prompt"]})
    body = {**text, "prompt": ids.json["tokens"]}
    answer = router.send(PATHS["completions"], body, path=way)
    assert answer.text == alone(fleet, PATHS["completions"], text, answer).text


@pytest.mark.parametrize("api", PATHS)
def test_both_legs_carry_the_same_ids(fleet, tapped, tap, api):
    body = of(api)
    answer = tapped.send(PATHS[api], body, path=REMOTE)
    assert answer.path == REMOTE
    [leg] = [json.loads(seen.body) for seen in tap.seen]
    sent = leg["kv_transfer_params"]["prompt_token_ids"] if api == "chat" else leg["prompt"]
    question = {key: body[key] for key in ("model", "prompt", "messages") if key in body}
    own = send(fleet.p.url, "/tokenize", question).json["tokens"]
    assert sent == own
    assert answer.text == alone(fleet, PATHS[api], body, answer).text


@pytest.mark.parametrize("api", PATHS)
def test_several_choices_are_the_engines_own(fleet, router, api, n=3):
    # Greedy sampling is refused with several choices; a seed makes each the same again.
    body = of(api, n=n, temperature=1, seed=7)
    answer = router.send(PATHS[api], body)
    # One hand-off is for one sequence.
    assert (answer.path, answer.reason) == (LOCAL, "batch")
    expected = alone(fleet, PATHS[api], body, answer)
    assert texts(answer) == texts(expected)
    assert len(texts(answer)) == n


def texts(answer):
    return [c.get("text") or c["message"]["content"] for c in answer.json["choices"]]


def test_a_batch_of_prompts_is_answered_in_one_place(fleet, router):
    prompts = [of("completions")["prompt"] for _ in range(3)]
    body = {**of("completions"), "prompt": prompts}
    answer = router.send(PATHS["completions"], body)
    assert (answer.path, answer.reason) == (LOCAL, "batch")
    assert texts(answer) == texts(alone(fleet, PATHS["completions"], body, answer))
