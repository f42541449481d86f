"""simonw's llm: prompts non-streamed and streamed, tools, schemas."""

from functools import cache
from typing import Any

from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, run_scenarios, warmth


class Place(BaseModel):
    city: str
    degrees: int


class OneTry(Chat):
    """llm's chat model without retries, for which llm has no setting."""

    def get_client(self, *args: Any, **options: Any) -> Any:
        return super().get_client(*args, **options).with_options(max_retries=0)


@cache
def model_at(url: str) -> Chat:
    model = OneTry(MODEL, model_name=MODEL, api_base=url, supports_tools=True, supports_schema=True)
    model.key = KEY
    return model


def parts_of(response: Any) -> dict[str, Any]:
    usage = response.usage()
    return {
        "text": response.text(),
        "calls": [call.name for call in response.tool_calls()],
        "usage": [usage.input, usage.output],
    }


def non_streamed(url: str, prompt: str) -> Any:
    return parts_of(model_at(url).prompt(prompt, stream=False))


def streamed(url: str, prompt: str) -> Any:
    response = model_at(url).prompt(prompt)
    pieces = list(response)
    assert "".join(pieces) == response.text()
    return parts_of(response)


def tools(url: str) -> Any:
    chain = model_at(url).chain(PROMPTS["tools"], tools=[warmth])
    return [parts_of(response) for response in chain.responses()]


def shape(url: str) -> Any:
    response = model_at(url).prompt(PROMPTS["shape"], schema=Place, stream=False)
    return Place.model_validate_json(response.text()).model_dump()


run_scenarios(
    variants={"non-streamed": non_streamed, "streamed": streamed},
    scenarios={"tools": tools, "shape": shape},
)
