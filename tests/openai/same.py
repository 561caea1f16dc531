"""Is a reply through the router the engine's own?

Each request is sent through the router once on each path, then once more straight to the engine
that answered, under the same `X-Request-Id` (the engines name replies after it). The replies must
be equal in every member, those that the client does not know included, except for

* `created`: the second in which the engine took the request;
* in `usage.prompt_tokens_details`, what was cached: it is a fact about the engine's cache at that
  moment, and the first of two equal requests fills it for the second (the router's part in it,
  that the count stays truthful, is tested in `crates/cli/tests/conversation.rs`);
* in a stream of several choices, how these alternate, and which choice's last event bears the
  fingerprint: the engine says a token when it has it. Within each choice the order must be the same.
"""

import uuid

import openai

from fleet import Fleet

REMOTE, LOCAL = "remote", "local"

# Remote first: the local path finds the cache filled then, instead of the other way round.
BOTH = (REMOTE, LOCAL)

LEGS = {REMOTE: ["prefill", "decode"], LOCAL: ["local"]}


class Asker:
    """Sends requests through the router and to its engines, and holds the replies together."""

    def __init__(self, fleet: Fleet, client: openai.OpenAI, engines: dict[str, openai.OpenAI]):
        self._fleet = fleet
        self._client = client
        self._engines = engines
        self._expected: dict[str, list[str]] = {}

    def chat(self, **request):
        """The reply to a chat (a list of events if streamed), once it is known to be the same."""
        return self._same(lambda client: client.chat.completions, BOTH, request)

    def completion(self, **request):
        """The same for a completion."""
        return self._same(lambda client: client.completions, BOTH, request)

    def unsplit_chat(self, **request):
        """The same for a chat that has to go local."""
        return self._same(lambda client: client.chat.completions, [LOCAL], request, reason="batch")

    def unsplit_completion(self, **request):
        """The same for a completion that has to go local."""
        return self._same(lambda client: client.completions, [LOCAL], request, reason="batch")

    def _same(self, api, paths, request, reason="override"):
        request = {"model": "mock", **request}
        request_id = f"same-{uuid.uuid4().hex}"
        said, legs = None, []
        for path in paths:
            headers, said = send(api(self._client), request, request_id, path)
            assert headers["x-pointsman-path"] == path
            assert headers["x-pointsman-reason"] == reason
            engine = self._engines[headers["x-pointsman-worker"]]
            _, alone = send(api(engine), request, request_id)
            assert comparable(said) == comparable(alone), f"on the {path} path"
            # Those through the router, and the one straight to the engine.
            legs += [*LEGS[path], "local"]
        self._expected[request_id] = legs
        return said

    def check_legs(self) -> None:
        """The engines saw the legs that the paths consist of, and no others."""
        seen = self._fleet.legs()
        for request_id, expected in self._expected.items():
            assert sorted(seen[request_id]) == sorted(expected)


def send(api, request, request_id, path=None):
    """Headers and reply of one request; of a stream all events."""
    headers = {"X-Request-Id": request_id}
    if path is not None:
        headers["X-Pointsman-Path"] = path
    raw = api.with_raw_response.create(**request, extra_headers=headers)
    reply = raw.parse()
    if request.get("stream"):
        with reply:
            return raw.headers, list(reply)
    return raw.headers, reply


def comparable(reply):
    """The members of a reply that have to be equal."""
    if not isinstance(reply, list):
        return without_what_varies(reply)
    events = [without_what_varies(event) for event in reply]
    choices = {choice["index"] for event in events for choice in event["choices"]}
    if len(choices) < 2:
        return events
    fingerprints = {event.pop("system_fingerprint", None) for event in events}
    by_choice = {
        index: [event for event in events if [c["index"] for c in event["choices"]] == [index]]
        for index in choices
    }
    others = [event for event in events if not event["choices"]]
    assert len(events) == len(others) + sum(map(len, by_choice.values()))
    return fingerprints, by_choice, others


def without_what_varies(reply) -> dict:
    members = reply.to_dict(mode="json")
    del members["created"]
    details = (members.get("usage") or {}).get("prompt_tokens_details") or {}
    for varies in ("cached_tokens", "created_cache_tokens"):
        details.pop(varies, None)
    return members


def text_of(events, index=0) -> str:
    """What a stream says in one choice."""
    said = ""
    for event in events:
        for choice in event.choices:
            if choice.index == index:
                said += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
    return said
