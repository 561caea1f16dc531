"""HTTP as the tests need it: the standard library, and nothing that retries or corrects."""

import http.client
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

# Generous: nothing waits that long unless it has failed.
PATIENCE = 120


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def path(self) -> str:
        return self.headers["x-pointsman-path"]

    @property
    def reason(self) -> str:
        return self.headers["x-pointsman-reason"]

    @property
    def worker(self) -> str:
        return self.headers["x-pointsman-worker"]

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        parts = self.body.decode().split("\n\n")
        return [part.removeprefix("data: ") for part in parts if part]

    @property
    def chunks(self) -> list[dict]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def is_done(self) -> bool:
        return self.events[-1] == "[DONE]"

    @property
    def text(self) -> str:
        """What was said, streamed or not, in the first choice."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            return "".join(said(c) for chunk in self.chunks for c in chunk.get("choices", []))
        return said(self.json["choices"][0])


def said(choice: dict) -> str:
    if "text" in choice:
        return choice["text"]
    message = choice.get("message") or choice.get("delta")
    return message.get("content") or ""


class Exchange:
    """A request that was sent, and whose answer is read when the test wants it."""

    def __init__(self, url: str, path: str, body=None, headers=None, method=None):
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        data = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json", **(headers or {})}
        self._connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        self._response = None

    def head(self) -> int:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response.status

    @property
    def headers(self) -> dict:
        self.head()
        return {name.lower(): value for name, value in self._response.getheaders()}

    def events(self, count: int) -> bytes:
        """Reads until that many events have come."""
        self.head()
        read = b""
        while read.count(b"\n\n") < count:
            line = self._response.readline()
            assert line, f"the stream ended early: {read!r}"
            read += line
        return read

    def stream(self):
        """The data of each event, as it comes."""
        self.head()
        for line in self._response:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip().decode()

    def rest(self) -> Answer:
        headers, body = self.headers, self._response.read()
        self._connection.close()
        return Answer(self._response.status, headers, body)

    def leave(self) -> None:
        """Goes away as a client does that has lost its patience."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def send(url: str, path: str, body=None, headers=None, method=None) -> Answer:
    return Exchange(url, path, body, headers, method).rest()


def metrics(url: str) -> dict[str, float]:
    """Each line of `/metrics`, by name and labels as they are written."""
    lines = send(url, "/metrics").body.decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def until(what: str, condition, seconds: float = 30, pause: float = 0.05):
    """Waits for a condition, at most that long, and gives what it gave."""
    deadline = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(pause)
    return met
