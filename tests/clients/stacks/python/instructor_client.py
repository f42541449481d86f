"""instructor: typed answers by tool call and by JSON schema, non-streamed and streamed."""

from functools import cache
from typing import Any

import instructor
import openai
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, run_scenarios


class Place(BaseModel):
    city: str
    degrees: int


@cache
def client_at(url: str, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return instructor.from_openai(client, mode=mode)


def request_for(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_retries": 0}


def non_streamed(url: str, prompt: str) -> Any:
    completion = client_at(url).chat.completions.create(**request_for(prompt), response_model=None)
    return {
        "text": completion.choices[0].message.content,
        "usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
    }


def shape(url: str) -> Any:
    modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    return [
        client_at(url, mode)
        .create(**request_for(PROMPTS["shape"]), response_model=Place)
        .model_dump()
        for mode in modes
    ]


def shape_streamed(url: str) -> Any:
    *_, last = client_at(url).create_partial(**request_for(PROMPTS["shape"]), response_model=Place)
    return last.model_dump()


run_scenarios(
    variants={"non-streamed": non_streamed},
    scenarios={"shape": shape, "shape streamed": shape_streamed},
)
