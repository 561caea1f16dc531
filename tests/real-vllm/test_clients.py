"""Clients that people have, unchanged: the `openai` package, and vLLM's own benchmark."""

import json

import openai
import pytest

from fleet import MODEL, is_alive
from prompts import words
from wire import until

SHAPE = {"model": MODEL, "temperature": 0, "max_tokens": 16}


@pytest.fixture
def client(router):
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("way", ["remote", "local"])
def test_the_openai_client_chats(client, way):
    messages = [{"role": "user", "content": words(200)}]
    headers = {"x-pointsman-path": way}
    ask = client.chat.completions.create
    whole = ask(messages=messages, **SHAPE, extra_headers=headers)
    options = {"include_usage": True}
    events = list(
        ask(messages=messages, stream=True, stream_options=options, **SHAPE, extra_headers=headers)
    )
    said = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert said == whole.choices[0].message.content
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("way", ["remote", "local"])
def test_the_openai_client_completes(client, way):
    headers = {"x-pointsman-path": way}
    prompt = words(200)
    whole = client.completions.create(prompt=prompt, **SHAPE, extra_headers=headers)
    events = client.completions.create(prompt=prompt, stream=True, **SHAPE, extra_headers=headers)
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text


def test_the_openai_client_sees_the_engines_refusals(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**{**SHAPE, "prompt": words(200), "temperature": -1})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**SHAPE, "prompt": "x", "model": "unheard of"})
    with pytest.raises(openai.BadRequestError, match="maximum"):
        client.completions.create(**{**SHAPE, "prompt": words(20_000)})


def test_vllms_benchmark_runs(fleet, router, tmp_path):
    log, result = tmp_path / "bench.log", tmp_path / "result.json"
    requests = 12
    arguments = [
        *("bench", "serve", "--backend", "openai-chat", "--base-url", router.url),
        *("--endpoint", "/v1/chat/completions"),
        *("--model", MODEL, "--tokenizer", str(fleet.p.model), "--dataset-name", "random"),
        *("--random-input-len", "400", "--random-output-len", "16"),
        *("--num-prompts", str(requests), "--request-rate", "8", "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", result.name),
    ]
    pid = fleet.launcher.run(log, arguments)
    until("the benchmark has ended", lambda: not is_alive(pid), 180)
    assert result.exists(), log.read_text()
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"]) == (requests, 0), log.read_text()
    assert found["total_output_tokens"] == requests * 16
