"""What is no generation: the list of models, and requests that pass through."""

import openai
import pytest


def test_models_are_listed_with_their_adapters(client):
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"mock", "mock-lora"}
    assert listed["mock-lora"].parent == "mock"
    assert listed["mock"].object == "model"


def test_a_model_is_retrieved_by_its_name(client):
    for name in ("mock", "mock-lora"):
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.param == "model"


@pytest.mark.parametrize("inputs", ["one text", ["two", "texts"], [1, 2, 3], [[1, 2], [3]]])
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_embeddings_are_the_engines_own(client, engines, inputs, encoding_format):
    ask = {"model": "mock", "input": inputs, "encoding_format": encoding_format}
    raw = client.embeddings.with_raw_response.create(**ask)
    assert raw.headers["x-pointsman-path"] == "local"
    alone = engines[raw.headers["x-pointsman-worker"]].embeddings.create(**ask)
    # The engine names its answers by chance, and takes the time.
    varies = {"id", "created"}
    through, alone = raw.parse().to_dict(), alone.to_dict()
    assert through.keys() == alone.keys() >= {"data", "usage"}
    assert {k: v for k, v in through.items() if k not in varies} == {
        k: v for k, v in alone.items() if k not in varies
    }


def test_embeddings_of_an_unknown_model_are_refused(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="text")
