"""Fixtures: one fleet of real engines for all tests, routers before it, and a look after each test at
what it left behind."""

import itertools
import os
from pathlib import Path

import pytest

from fleet import DECODE, LEASE_SECONDS, PREFILL, Engine, Launcher, Router
from fleet import configuration, free_port, worker
from tap import Tap
from wire import until

MODEL_DIR = Path(os.environ["REAL_VLLM_MODEL"])


class Fleet:
    """One prefill and two decode engines, a tap before the former, and routers."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._numbers = itertools.count()
        self.launcher = Launcher(directory)
        self.p = Engine(self.launcher, "p", PREFILL, MODEL_DIR)
        self.d1 = Engine(self.launcher, "d1", DECODE, MODEL_DIR)
        # Of this one the router binds the event socket, of the others it connects to it.
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.d2 = Engine(self.launcher, "d2", DECODE, MODEL_DIR, events=endpoint)
        self.engines = [self.p, self.d1, self.d2]
        for engine in self.engines:
            engine.start()
        for engine in self.engines:
            engine.wait()
        self.tap = Tap(self.p.port)
        self.routers: list[Router] = []

    @property
    def decoders(self) -> list[Engine]:
        return [self.d1, self.d2]

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def router(self, workers: list[dict] | None = None, **more) -> Router:
        directory = self.directory / f"router-{next(self._numbers)}"
        directory.mkdir()
        workers = workers or [worker(engine) for engine in self.engines]
        router = Router(directory, configuration(MODEL_DIR, workers, **more))
        self.routers.append(router)
        return router

    def tapped(self, **more) -> Router:
        """A router that reaches the prefill engine through the tap."""
        # The other router has bound the socket.
        d2 = {**worker(self.d2), "kv_events": "off"}
        return self.router([worker(self.p, url=self.tap.url), worker(self.d1), d2], **more)

    def check(self) -> None:
        """Nothing runs, nothing is pinned past its lease, and no engine has died."""
        for engine in self.engines:
            assert engine.is_healthy(), f"{engine.name} is dead:\n{engine.tail()}"
            until(f"{engine.name} is at rest", engine.is_at_rest, LEASE_SECONDS + 20)
        for router in self.routers:
            until(f"{router.url} is at rest", lambda: not router.unrest())

    def stop(self) -> None:
        for router in self.routers:
            router.stop()
        self.tap.stop()
        for engine in self.engines:
            engine.stop()
        self.launcher.stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def router(fleet):
    return fleet.router()


@pytest.fixture(scope="session")
def tapped(fleet, router):
    return fleet.tapped()


@pytest.fixture
def tap(fleet):
    fleet.tap.reset()
    yield fleet.tap
    fleet.tap.reset()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(fleet):
    yield
    fleet.check()
