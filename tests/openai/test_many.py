"""The async client: many streams at once, and some that are cancelled."""

import asyncio

import openai

from conftest import CLIENT
from same import LOCAL, REMOTE, comparable

STREAMS = 50


def request(number):
    return {
        "model": "mock",
        "messages": [
            # Half of them share a beginning.
            {"role": "system", "content": f"You are helper number {number % 2}. " * 20},
            {"role": "user", "content": f"Tell me about number {number}."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# Of an answer that takes longer than any test.
ENDLESS = {"max_tokens": 10_000, "extra_body": {"ignore_eos": True}}


async def stream(client, number, path=None, begun=None, **more):
    headers = {"X-Request-Id": f"many-{number}"}
    if path is not None:
        headers["x-pointsman-path"] = path
    create = client.chat.completions.with_raw_response.create
    raw = await create(**request(number), **more, extra_headers=headers)
    async with raw.parse() as events:
        said = []
        async for event in events:
            said.append(event)
            if begun is not None:
                begun.set()
    return raw.headers.get("x-pointsman-worker"), raw.headers.get("x-pointsman-path"), said


def test_fifty_streams_at_once_are_each_the_same(fleet, router):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", **CLIENT) as client:
            paths = [REMOTE if number % 2 else LOCAL for number in range(STREAMS)]
            through = await asyncio.gather(
                *(stream(client, number, path) for number, path in enumerate(paths))
            )
        assert [path for _, path, _ in through] == paths
        alone = {
            engine.name: openai.AsyncOpenAI(base_url=f"{engine.url}/v1", **CLIENT)
            for engine in fleet.engines
        }
        try:
            direct = await asyncio.gather(
                *(stream(alone[worker], number) for number, (worker, _, _) in enumerate(through))
            )
        finally:
            await asyncio.gather(*(client.close() for client in alone.values()))
        for (_, _, said), (_, _, expected) in zip(through, direct, strict=True):
            assert comparable(said) == comparable(expected)
        assert len({worker for worker, _, _ in through}) == 2, "one decode worker had it all"

    asyncio.run(run())


def test_streams_that_are_cancelled_leave_nothing_and_harm_nobody(fleet, router, faults):
    faults(*({"leg": leg, "fault": "slow_tokens", "delay_ms": 20} for leg in ("decode", "local")))

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", **CLIENT) as client:
            begun = [asyncio.Event() for _ in range(20)]
            tasks = []
            for number, event in enumerate(begun):
                path = [REMOTE, LOCAL][number // 2 % 2]
                more = {} if number % 2 else ENDLESS
                tasks.append(asyncio.create_task(stream(client, number, path, event, **more)))
            await asyncio.gather(*(event.wait() for event in begun))
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended[::2]:
            assert isinstance(outcome, asyncio.CancelledError), outcome
        for _, _, said in ended[1::2]:
            assert said[-1].usage.completion_tokens > 0

    asyncio.run(run())
