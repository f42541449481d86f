"""instructor: typed answers by tool call and by JSON schema, non-streamed and streamed."""

from functools import cache
from typing import Any

import instructor
import openai
from pydantic import BaseModel
from stage import KEY, MODEL, SAID, TIMEOUT_S, play


class Place(BaseModel):
    city: str
    degrees: int


@cache
def client_at(url: str, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    return instructor.from_openai(client, mode=mode)


def asked(words: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_retries": 0}


def whole(url: str, words: str) -> Any:
    completion = client_at(url).chat.completions.create(**asked(words), response_model=None)
    return {
        "text": completion.choices[0].message.content,
        "usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
    }


def shape(url: str) -> Any:
    modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    return [
        client_at(url, mode).create(**asked(SAID["shape"]), response_model=Place).model_dump()
        for mode in modes
    ]


def shape_streamed(url: str) -> Any:
    *_, last = client_at(url).create_partial(**asked(SAID["shape"]), response_model=Place)
    return last.model_dump()


play(ways={"whole": whole}, alone={"shape": shape, "shape streamed": shape_streamed})
