"""`pointsman up` alone is enough for the client."""

import openai

from conftest import CLIENT
from fleet import Process


def test_up_serves_the_client(fleet):
    up = Process("up", "--port", "0", "--speed", "inf")
    try:
        with openai.OpenAI(base_url=f"{up.url}/v1", **CLIENT) as client:
            [model] = client.models.list()
            messages = [{"role": "user", "content": "Hello?"}]
            whole = client.chat.completions.create(model=model.id, messages=messages)
            streamed = client.chat.completions.create(
                model=model.id, messages=messages, stream=True
            )
            said = "".join(event.choices[0].delta.content or "" for event in streamed)
            assert said == whole.choices[0].message.content
    finally:
        up.stop()
