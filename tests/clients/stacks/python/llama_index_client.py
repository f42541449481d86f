"""LlamaIndex's OpenAILike: chat, stream_chat, tools, structured output."""

from functools import cache
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from scenario_runner import KEY, MODEL, PROMPTS, TIMEOUT_S, run_scenarios, warmth


class Place(BaseModel):
    """A city and its temperature."""

    city: str
    degrees: int


@cache
def model_at(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        timeout=TIMEOUT_S,
    )


def parts_of(model: OpenAILike, response: Any) -> dict[str, Any]:
    calls = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return {
        "text": response.message.content or "",
        "calls": [call.tool_name for call in calls],
    }


def non_streamed(url: str, prompt: str) -> Any:
    model = model_at(url)
    response = model.chat([ChatMessage(prompt)])
    (choice,) = response.raw.choices
    usage = response.raw.usage
    ended = {
        "finish": choice.finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }
    return {**parts_of(model, response), **ended}


def streamed(url: str, prompt: str) -> Any:
    model = model_at(url)
    responses = list(model.stream_chat([ChatMessage(prompt)]))
    assert "".join(response.delta or "" for response in responses) == responses[-1].message.content
    return parts_of(model, responses[-1])


def tools(url: str) -> Any:
    model, tool = model_at(url), FunctionTool.from_defaults(warmth)
    first = model.chat_with_tools([tool], user_msg=PROMPTS["tools"])
    (call,) = model.get_tool_calls_from_response(first)
    tool_result = tool(**call.tool_kwargs).content
    history = [
        ChatMessage(PROMPTS["tools"]),
        first.message,
        ChatMessage(tool_result, role="tool", additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    last = model.chat_with_tools([tool], chat_history=history)
    return [parts_of(model, first), parts_of(model, last)]


def shape(url: str) -> Any:
    return model_at(url).structured_predict(Place, PromptTemplate(PROMPTS["shape"])).model_dump()


run_scenarios(
    variants={"non-streamed": non_streamed, "streamed": streamed},
    scenarios={"tools": tools, "shape": shape},
)
