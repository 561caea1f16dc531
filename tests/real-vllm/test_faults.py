"""Engines and routers that die, freeze or come too late, and clients that leave: no wrong text, no dead
decode engine, nothing pinned past its lease, and a full answer where one is promised."""

import json
import socket
import time
import uuid

import pytest

from fleet import LEASE_SECONDS, worker
from prompts import CHAT, COMPLETIONS, PATHS, completion, of
from wire import Exchange, send, until

# Each kind of reply and each endpoint once: what is tested takes seconds.
KINDS = pytest.mark.parametrize(("api", "stream"), [("completions", False), ("chat", True)])
REMOTE = {"x-pointsman-path": "remote"}

# Long enough that something can happen while it goes on.
LONG_ANSWER = 1500
LONG_PROMPT = 4000


def is_right(fleet, path, body, answer):
    assert answer.status == 200, answer
    engine = fleet.engine(answer.worker)
    engine.forget()
    expected = send(engine.url, path, body)
    assert answer.text == expected.text
    assert not body.get("stream") or answer.is_done
    assert b'"error"' not in answer.body


def revive(*engines):
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait()


def knows(router, *engines):
    """Waits until the router has seen that they are back."""

    def up():
        seen = {worker["name"]: worker["condition"] for worker in router.workers()}
        return all(seen[engine.name] == "up" for engine in engines)

    until("the router knows of it", up)


@KINDS
def test_a_prefill_engine_that_dies_with_the_prompt_computed(fleet, tapped, tap, api, stream):
    def kill(body):
        fleet.p.kill()
        return body

    tap.after = kill
    body = of(api, stream=stream)
    answer = tapped.send(PATHS[api], body)
    # And one that is dead already, known or not.
    tap.reset()
    second = of(api, stream=stream)
    without = tapped.send(PATHS[api], second)
    revive(fleet.p)
    knows(tapped, fleet.p)
    for request, reply in ((body, answer), (second, without)):
        assert reply.path == "local"
        is_right(fleet, PATHS[api], request, reply)


def test_a_decode_engine_that_dies_before_it_is_asked(fleet, tapped, tap):
    body = completion()
    dead = fleet.engine(tapped.explain(body)["decode_worker"])

    def kill(answer):
        dead.kill()
        return answer

    tap.after = kill
    answer = tapped.send(COMPLETIONS, body)
    revive(dead)
    knows(tapped, dead)
    assert answer.worker != dead.name
    # The prompt is prefilled once: the other engine fetches it, or computes it itself where the leg may
    # have gone out on a connection that the dead one had left open.
    assert len(tap.seen) == 1
    is_right(fleet, COMPLETIONS, body, answer)


def test_a_decode_engine_that_dies_within_its_answer(fleet, router):
    body = of("chat", stream=True, max_tokens=LONG_ANSWER)
    exchange = Exchange(router.url, CHAT, body, REMOTE)
    begun = exchange.events(5)
    dead = fleet.engine(exchange.headers["x-pointsman-worker"])
    dead.kill()
    end = exchange.rest()
    revive(dead)
    knows(router, dead)
    assert not end.is_done
    assert "broke off" in json.loads(end.events[-1])["error"]["message"]
    # What came before is what the engine would have said.
    end.body = begun + end.body
    said = "".join(
        c.get("text") or (c.get("delta") or {}).get("content") or ""
        for chunk in end.chunks
        for c in chunk.get("choices", [])
    )
    whole = send(fleet.d1.url, CHAT, {**body, "stream": False})
    assert said and whole.text.startswith(said)


def test_a_hand_off_that_waited_past_its_lease_is_not_used(fleet, tapped, tap):
    frozen = []

    def wait(answer):
        # Frozen, the router cannot know how long the answer has been there.
        tapped.freeze(True)
        frozen.append(time.monotonic())
        return answer

    tap.after = wait
    body = completion(stream=True)
    try:
        exchange = Exchange(tapped.url, COMPLETIONS, body)
        until("the prompt is computed and kept", lambda: frozen)
        # By the clock: the engine's gauge is of its last step, and says 0 between two of them.
        over = frozen[0] + LEASE_SECONDS + 1
        until("its lease is over", lambda: time.monotonic() > over and fleet.p.pinned() == 0)
        # Other prompts take the blocks, so that what is fetched from them would show.
        for _ in range(4):
            send(fleet.p.url, COMPLETIONS, completion(LONG_PROMPT, max_tokens=1))
    finally:
        tapped.freeze(False)
    answer = exchange.rest()
    assert answer.path == "local"
    is_right(fleet, COMPLETIONS, body, answer)


@KINDS
def test_a_side_channel_that_does_not_answer(fleet, tapped, tap, api, stream):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()

        def divert(answer):
            reply = json.loads(answer)
            # An engine that the decode workers have not met yet.
            reply["kv_transfer_params"]["remote_engine_id"] = str(uuid.uuid4())
            reply["kv_transfer_params"]["remote_port"] = mute.getsockname()[1]
            return json.dumps(reply).encode()

        tap.after = divert
        body = of(api, stream=stream)
        answer = tapped.send(PATHS[api], body)
    assert answer.path == "local"
    is_right(fleet, PATHS[api], body, answer)


def test_a_router_that_is_killed_leaves_nothing_behind(fleet):
    # Its event socket is not free to bind, so this one does without.
    workers = [{**worker(engine), "kv_events": "off"} for engine in fleet.engines]
    first = fleet.router(workers)
    streaming = Exchange(first.url, CHAT, of("chat", stream=True, max_tokens=LONG_ANSWER), REMOTE)
    streaming.events(3)
    prefilling = Exchange(first.url, COMPLETIONS, completion(LONG_PROMPT), REMOTE)
    until("the prompt is being computed", lambda: fleet.p.metric("vllm:num_requests_running"))
    first.kill()
    fleet.routers.remove(first)
    for exchange in (streaming, prefilling):
        exchange.leave()
    for engine in fleet.engines:
        until(f"{engine.name} is at rest", engine.is_at_rest, LEASE_SECONDS + 5)
    second = fleet.router(workers)
    body = completion()
    is_right(fleet, COMPLETIONS, body, second.send(COMPLETIONS, body, path="remote"))


def test_a_client_that_leaves_while_its_prompt_is_computed(fleet, router):
    exchange = Exchange(router.url, COMPLETIONS, completion(LONG_PROMPT, stream=True), REMOTE)
    until("the prompt is being computed", lambda: fleet.p.metric("vllm:num_requests_running"))
    exchange.leave()
    began = time.monotonic()
    until("the engine has stopped", fleet.p.is_at_rest)
    assert time.monotonic() - began < LEASE_SECONDS + 3


def test_a_client_that_leaves_between_the_legs(fleet, tapped, tap):
    left = []

    def leave(answer):
        exchange.leave()
        left.append(time.monotonic())
        until("the router knows", lambda: not tapped.unrest())
        return answer

    tap.after = leave
    exchange = Exchange(tapped.url, COMPLETIONS, completion(), REMOTE)
    until("the client has left", lambda: left)
    until("nothing is pinned", lambda: fleet.p.pinned() == 0)
    assert time.monotonic() - left[0] < LEASE_SECONDS + 3


@pytest.mark.parametrize("events", [1, 8])
@pytest.mark.parametrize("way", ["remote", "local"])
def test_a_client_that_leaves_within_its_answer(fleet, router, way, events):
    body = of("chat", stream=True, max_tokens=LONG_ANSWER)
    exchange = Exchange(router.url, CHAT, body, {"x-pointsman-path": way})
    exchange.events(events)
    exchange.leave()
    began = time.monotonic()
    for engine in fleet.engines:
        until(f"{engine.name} is at rest", engine.is_at_rest)
    # At once, and not when the answer would have ended.
    assert time.monotonic() - began < LEASE_SECONDS


def test_prompts_that_are_given_up_are_released_at_once(fleet, tapped, tap):
    """A hand-off that the router does not trust is released by it, long before its lease ends."""

    def lie(answer):
        reply = json.loads(answer)
        reply["usage"]["prompt_tokens"] += 1
        return json.dumps(reply).encode()

    tap.after = lie
    body = completion()
    answer = tapped.send(COMPLETIONS, body)
    began = time.monotonic()
    assert answer.path == "local"
    until("nothing is pinned", lambda: fleet.p.pinned() == 0)
    assert time.monotonic() - began < LEASE_SECONDS / 2
    is_right(fleet, COMPLETIONS, body, answer)
