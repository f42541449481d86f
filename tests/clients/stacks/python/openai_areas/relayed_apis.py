"""Backend APIs other than chat, relayed by the proxy."""

from typing import Any

import pytest
from model import NAME

PLAIN = f"{NAME}:plain"


def test_models_are_listed_with_and_without_plain_suffix(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME, PLAIN]
    found = client.models.retrieve(PLAIN)
    assert (found.id, found.model_extra["max_model_len"]) == (PLAIN, 1_000_000)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}])
def test_embeddings_are_relayed(client: Any, form: Any) -> None:
    made = client.embeddings.create(model=NAME, input=["one", "three"], **form)
    assert [each.embedding for each in made.data] == [[3.0], [5.0]]
    assert (made.model, made.usage.total_tokens) == (NAME, 2)


@pytest.mark.parametrize("model", [NAME, PLAIN])
def test_legacy_completions_are_relayed(client: Any, model: str) -> None:
    made = client.completions.create(model=model, prompt="one two")
    assert (made.choices[0].text, made.model) == ("one two ", NAME)
    stream = client.completions.create(model=model, prompt="one two", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["one ", "two ", ""]


def test_moderations_are_relayed(client: Any) -> None:
    judged = [
        client.moderations.create(model=NAME, input=text).results[0] for text in ("harm", "good")
    ]
    assert [each.flagged for each in judged] == [True, False]
    assert judged[0].categories.violence
