"""Processes under test: mock engines, and a router in front of them.

Everything listens on a free port of the loopback device. What a fleet has started it ends.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

BINARY = os.environ["POINTSMAN_BIN"]

MODEL = "mock"
ADAPTER = "mock-lora"

# Tokens that a prompt and its answer may have together.
MAX_MODEL_LEN = 16_384

# How long a process may take to be ready, and a fleet to come to rest. Generous, because nothing
# waits that long unless it has failed.
READY_SECONDS = 60
REST_SECONDS = 20


class Process:
    """One `pointsman` process; `url` is where it says that it is ready."""

    def __init__(self, *arguments: str):
        self._log = tempfile.TemporaryFile()
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("POINTSMAN__", "DYN"))
        }
        self._process = subprocess.Popen(
            [BINARY, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        # Ends the reading below if the process neither speaks nor dies.
        alarm = threading.Timer(READY_SECONDS, self._process.kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                if " is ready on " in line:
                    return line.rsplit(" ", 1)[1].strip()
        finally:
            alarm.cancel()
        raise RuntimeError(f"{self._process.args} did not start:\n{self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def stop(self) -> None:
        """Ends it; an end that is not a clean one is shown with its log."""
        self._process.terminate()
        self._process.stdout.close()
        code = self._process.wait(READY_SECONDS)
        log = self.log()
        self._log.close()
        assert code == 0, f"{self._process.args} ended with {code}:\n{log}"


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def post(url: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


@dataclass
class Engine:
    """A mock engine under the name that the router knows it by."""

    name: str
    role: str
    process: Process

    @property
    def url(self) -> str:
        return self.process.url

    def stats(self) -> dict:
        return get(f"{self.url}/mock/stats")

    def set_faults(self, faults: dict) -> None:
        post(f"{self.url}/mock/faults", faults)


@dataclass
class Fleet:
    """Two prefill and two decode engines; routers are put in front of them by `router`."""

    engines: list[Engine] = field(default_factory=list)
    routers: list[Process] = field(default_factory=list)

    @classmethod
    def start(cls) -> "Fleet":
        fleet = cls()
        for role in ("prefill", "decode"):
            for number in range(2):
                process = Process(
                    "engine",
                    *("--role", role, "--model", MODEL, "--adapter", ADAPTER),
                    *("--speed", "inf", "--max-model-len", str(MAX_MODEL_LEN)),
                )
                fleet.engines.append(Engine(f"{role}-{number}", role, process))
        return fleet

    def router(self, directory: Path, **settings) -> Process:
        workers = [
            {"name": engine.name, "url": engine.url, "role": engine.role} for engine in self.engines
        ]
        model = {
            "name": MODEL,
            "adapters": [ADAPTER],
            "tokenizer": "builtin",
            "workers": workers,
        }
        config = {
            "models": [model],
            # Lets each request choose its path by a header.
            "routing": {"allow_path_override": True},
            **settings,
        }
        file = directory / f"pointsman-{len(self.routers)}.yaml"
        file.write_text(json.dumps(config))
        process = Process("serve", "--port", "0", "--config", str(file))
        self.routers.append(process)
        return process

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def legs(self) -> dict[str, list[str]]:
        """The legs that each request id has had, of the latest requests, in no order."""
        legs = defaultdict(list)
        for engine in self.engines:
            for request in engine.stats()["requests"]:
                legs[request["headers"].get("x-request-id")].append(request["leg"])
        return legs

    def set_faults(self, faults: dict) -> None:
        for engine in self.engines:
            engine.set_faults(faults)

    def unrest(self) -> list[str]:
        """What is still going on, or was done wrong."""
        found = []
        for engine in self.engines:
            stats = engine.stats()
            found += [
                f"{engine.name}: {key} is {stats[key]}"
                for key in ("in_flight", "live", "pins", "violations", "broken_invariants", "dead")
                if stats[key]
            ]
        for router in self.routers:
            status = get(f"{router.url}/v1/pointsman/status")
            if status["requests_in_flight"]:
                found.append(f"{router.url}: {status['requests_in_flight']} requests in flight")
            for model in status["models"]:
                if model["live_bookings"] or model["ledger"] != "sound":
                    found.append(f"{router.url}: {model}")
        return found

    def wait_for_rest(self) -> None:
        """Returns once nothing runs, is booked or is pinned; what never ends is a leak."""
        deadline = time.monotonic() + REST_SECONDS
        while unrest := self.unrest():
            if time.monotonic() > deadline:
                raise AssertionError("the fleet does not come to rest: " + "; ".join(unrest))
            time.sleep(0.01)

    def stop(self) -> None:
        for process in [*self.routers, *(engine.process for engine in self.engines)]:
            process.stop()
