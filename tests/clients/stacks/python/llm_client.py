"""simonw's llm: prompts non-streamed and streamed, tools, schemas."""

from functools import cache
from typing import Any

from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel
from stage import KEY, MODEL, SAID, play, warmth


class Place(BaseModel):
    city: str
    degrees: int


class OneTry(Chat):
    """llm's chat model without retries, for which llm has no setting."""

    def get_client(self, *args: Any, **how: Any) -> Any:
        return super().get_client(*args, **how).with_options(max_retries=0)


@cache
def model_at(url: str) -> Chat:
    model = OneTry(MODEL, model_name=MODEL, api_base=url, supports_tools=True, supports_schema=True)
    model.key = KEY
    return model


def shown(response: Any) -> dict[str, Any]:
    usage = response.usage()
    return {
        "text": response.text(),
        "calls": [call.name for call in response.tool_calls()],
        "usage": [usage.input, usage.output],
    }


def whole(url: str, words: str) -> Any:
    return shown(model_at(url).prompt(words, stream=False))


def streamed(url: str, words: str) -> Any:
    response = model_at(url).prompt(words)
    pieces = list(response)
    assert "".join(pieces) == response.text()
    return shown(response)


def tools(url: str) -> Any:
    chain = model_at(url).chain(SAID["tools"], tools=[warmth])
    return [shown(response) for response in chain.responses()]


def shape(url: str) -> Any:
    response = model_at(url).prompt(SAID["shape"], schema=Place, stream=False)
    return Place.model_validate_json(response.text()).model_dump()


play(ways={"whole": whole, "streamed": streamed}, alone={"tools": tools, "shape": shape})
