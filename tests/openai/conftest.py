"""Fixtures: one fleet for all tests, its router's client, and a look after each test for leaks."""

import openai
import pytest

from fleet import Fleet
from same import Asker

# Without retries, so that what the client sees is what the router said the first time.
CLIENT = {"api_key": "unused", "max_retries": 0, "timeout": 30}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    fleet = Fleet.start()
    fleet.directory = tmp_path_factory.mktemp("routers")
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def router(fleet):
    return fleet.router(fleet.directory)


@pytest.fixture(scope="session")
def client(router):
    with openai.OpenAI(base_url=f"{router.url}/v1", **CLIENT) as client:
        yield client


@pytest.fixture(scope="session")
def engines(fleet):
    """A client of each engine alone, by its name."""
    clients = {
        engine.name: openai.OpenAI(base_url=f"{engine.url}/v1", **CLIENT) for engine in fleet.engines
    }
    yield clients
    for client in clients.values():
        client.close()


@pytest.fixture
def asker(fleet, client, engines):
    asker = Asker(fleet, client, engines)
    yield asker
    asker.check_legs()


@pytest.fixture
def faults(fleet):
    """Sets faults on every engine, and heals them after the test."""
    yield lambda *rules: fleet.set_faults({"rules": list(rules)})
    fleet.set_faults({})


@pytest.fixture(autouse=True)
def nothing_is_left_behind(fleet, request):
    yield
    fleet.wait_for_rest()
