"""Input that kills a decode engine, or makes it say another prompt's text, if it gets there. Through
the router both engines stay alive and the answer is right."""

import time

import pytest

from fleet import LEASE_SECONDS
from prompts import COMPLETIONS, PATHS, completion, of
from wire import send, until

WAYS = ["remote", "local"]

# Where a client may hide what an engine would merge into its own parameters.
PLACES = {
    "top": lambda params: {"kv_transfer_params": params},
    "xargs": lambda params: {"vllm_xargs": {"kv_transfer_params": params}},
    "extra_args": lambda params: {"sampling_params": {"extra_args": {"kv_transfer_params": params}}},
}


def prefilled(fleet, body) -> dict:
    """Parameters that the prefill engine really gave, for a prompt of a client's choice."""
    leg = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    return send(fleet.p.url, COMPLETIONS, leg).json["kv_transfer_params"]


def stays_right(fleet, router, path, body, hostile):
    for way in WAYS:
        answer = router.send(path, {**body, **hostile}, path=way)
        assert (answer.status, answer.path) == (200, way), answer
        engine = fleet.engine(answer.worker)
        engine.forget()
        assert answer.text == send(engine.url, path, body).text
        assert fleet.p.is_healthy() and all(d.is_healthy() for d in fleet.decoders)


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("place", PLACES)
def test_a_clients_own_wish_for_a_remote_prefill(fleet, router, api, place):
    stays_right(fleet, router, PATHS[api], of(api), PLACES[place]({"do_remote_prefill": True}))


@pytest.mark.parametrize("api", PATHS)
def test_params_that_name_no_request(fleet, router, api):
    params = prefilled(fleet, completion())
    del params["remote_request_id"]
    stays_right(fleet, router, PATHS[api], of(api), PLACES["top"](params))


def test_a_longer_prompt_than_was_prefilled(fleet, router):
    body = completion()
    params = prefilled(fleet, {**body, "prompt": body["prompt"][:400]})
    stays_right(fleet, router, COMPLETIONS, body, PLACES["top"](params))


def test_params_of_another_prompt(fleet, router):
    stays_right(fleet, router, COMPLETIONS, completion(), PLACES["top"](prefilled(fleet, completion())))


def test_params_past_their_lease(fleet, router):
    body = completion()
    params = prefilled(fleet, body)
    over = time.monotonic() + LEASE_SECONDS + 1
    until("the lease is over", lambda: time.monotonic() > over)
    stays_right(fleet, router, COMPLETIONS, body, PLACES["top"](params))


def test_a_batch_with_the_params_of_one_prompt(fleet, router):
    bodies = [completion() for _ in range(2)]
    params = prefilled(fleet, bodies[0])
    batch = {**bodies[0], "prompt": [body["prompt"] for body in bodies]}
    answer = router.send(COMPLETIONS, {**batch, **PLACES["top"](params)})
    assert (answer.status, answer.path, answer.reason) == (200, "local", "batch")
    engine = fleet.engine(answer.worker)
    engine.forget()
    for choice, body in zip(answer.json["choices"], bodies, strict=True):
        assert choice["text"] == send(engine.url, COMPLETIONS, body).text


@pytest.mark.parametrize(
    "hostile",
    [
        {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 7},
        {"disaggregated_params": {"request_type": "generation_only", "ctx_request_id": 7}},
        {"data_parallel_rank": 7},
    ],
    ids=["bootstrap", "disaggregated_params", "rank"],
)
@pytest.mark.parametrize("api", PATHS)
def test_what_steers_engines_of_other_kinds(fleet, router, api, hostile):
    stays_right(fleet, router, PATHS[api], of(api), hostile)
