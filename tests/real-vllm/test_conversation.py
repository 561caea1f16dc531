"""What the router takes for cached is what the engines report, on every turn of a conversation."""

import pytest

from fleet import BLOCK_TOKENS
from prompts import CHAT, chat, words
from wire import until

TURNS = 6


def candidates(router, body):
    return {seen["worker"]: seen for seen in router.explain(body)["candidates"]}


def settled(router, body):
    """What the router knows of each worker's cache, once events have stopped coming."""

    def events():
        return router.metric("pointsman_kv_events_total")

    before = [events()]

    def quiet():
        before.append(events())
        return before[-1] == before[-2]

    until("no more events come", quiet, pause=0.3)
    return {name: seen["overlap_tokens"] for name, seen in candidates(router, body).items()}


def gained(engine, before):
    after = engine.sources()
    return {source: after[source] - before.get(source, 0) for source in after}


@pytest.mark.parametrize("ways", ["RLLLLL", "RRRRRR", "LRLRLR"], ids=["local", "remote", "mixed"])
def test_the_effective_isl_is_what_the_engine_computes_or_fetches(fleet, router, ways):
    messages = [{"role": "system", "content": words(150)}]
    session = None
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(80 + 10 * turn)})
        body = {**chat(), "messages": messages}
        overlap = settled(router, body)
        before = {engine.name: engine.sources() for engine in fleet.engines}
        way = {"R": "remote", "L": "local"}[ways[turn]]
        answer = router.send(CHAT, body, path=way)
        assert (answer.status, answer.path) == (200, way), answer
        took = {engine.name: gained(engine, before[engine.name]) for engine in fleet.engines}
        usage = answer.json["usage"]
        isl = usage["prompt_tokens"]
        effective = isl - overlap[answer.worker]
        own = took[answer.worker]
        # What the worker did not have: computed by it or fetched.
        assert isl - own["local_cache_hit"] == effective, (turn, way, overlap, took)
        if way == "local":
            assert own["local_compute"] == effective
            assert usage["prompt_tokens_details"]["cached_tokens"] == isl - effective
        else:
            # Of what is fetched, the last token is computed again.
            assert own["external_kv_transfer"] in (effective - 1, effective)
            assert took["p"]["local_compute"] == isl - overlap["p"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == overlap["p"], usage
        if turn:
            # Nothing but what is new, and what fills no block yet, is left to do.
            assert session != answer.worker or effective < isl / 2 + BLOCK_TOKENS
        session = answer.worker
        messages.append({"role": "assistant", "content": answer.text})
