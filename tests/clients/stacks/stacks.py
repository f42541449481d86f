"""The clients: what each shows of an answer, and what it raises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ALL = frozenset({"text", "finish", "calls", "thought", "usage", "cited", "pictures", "files"})

Failing = Literal["refused", "broken", "cut", "unavailable"]


@dataclass(frozen=True)
class Way:
    """One way to ask."""

    name: str
    shows: frozenset[str]
    raises: Mapping[str, str]
    """The type, and the status where the client tells it, by scenario."""

    @property
    def streams(self) -> bool:
        """Whether it reads the answer as it comes."""
        return not {"streamed", "helper"}.isdisjoint(self.name.split())


@dataclass(frozen=True)
class Stack:
    """One client, in one version."""

    name: str
    """Of its lock."""
    language: Literal["python", "node"]
    program: str
    ways: tuple[Way, ...]
    tools: tuple[str, ...] = ()
    """Ways to use a tool of its own, in which every step shows."""
    agents: tuple[str, ...] = ()
    """Such in which the answer alone shows."""
    shapes: tuple[str, ...] = ()
    """Ways to have an answer in a form."""
    lists_models: bool = False

    def __str__(self) -> str:
        return f"{self.language}-{self.name}"


def failing(refused: str, broken: str, unavailable: str) -> dict[str, str]:
    """What is raised when the backend refuses, when it fails, and when no computer is to be had."""
    return {"refused": refused, "broken": broken, "cut": broken, "unavailable": unavailable}


# The openai SDK, and what stands on it. Once a stream has begun there is no status any more.
OPENAI = failing(
    "openai.BadRequestError 400",
    "openai.InternalServerError 500",
    "openai.InternalServerError 503",
)
OPENAI_STREAM = failing(*["openai.APIError"] * 3)
# Its helper keeps of the frames what belongs to a choice.
HELPER = ALL - {"files"}


def openai_sdk(name: str) -> Stack:
    """A major version of it in Python."""
    return Stack(
        name,
        "python",
        "openai_client.py",
        (
            Way("whole", ALL, OPENAI),
            Way("streamed", ALL, OPENAI_STREAM),
            Way("helper", HELPER, OPENAI_STREAM),
            Way("async", ALL, OPENAI),
            Way("async streamed", ALL, OPENAI_STREAM),
            Way("async helper", HELPER, OPENAI_STREAM),
        ),
        tools=("tools", "tools helper"),
        shapes=("shape", "shape helper"),
        lists_models=True,
    )


LANGCHAIN = frozenset({"text", "finish", "calls", "usage"})
LANGCHAIN_ERRORS = "langchain_openai.chat_models.base."
LANGCHAIN_WHOLE = failing(
    f"{LANGCHAIN_ERRORS}OpenAIInvalidRequestError 400",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 500",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 503",
)
LITELLM = ALL - {"files"}
LITELLM_WHOLE = failing(
    "litellm.exceptions.BadRequestError 400",
    "litellm.exceptions.InternalServerError 500",
    "litellm.exceptions.ServiceUnavailableError 503",
)
LITELLM_STREAM = failing(*["litellm.exceptions.MidStreamFallbackError 500"] * 3)
PYDANTIC_AI = frozenset({"text", "finish", "calls", "thought", "usage"})
PYDANTIC_AI_WHOLE = failing(
    "pydantic_ai.exceptions.ModelRequestRejectedError 400",
    "pydantic_ai.exceptions.ModelServerError 500",
    "pydantic_ai.exceptions.ModelUnavailableError 503",
)
# It takes the code of an error in the stream for a status where it is a number.
PYDANTIC_AI_STREAM = failing(
    "pydantic_ai.exceptions.ModelAPIError",
    "pydantic_ai.exceptions.ModelServerError 500",
    "pydantic_ai.exceptions.ModelAPIError",
)
TERSE = frozenset({"text", "calls", "usage"})

PYTHON = (
    openai_sdk("openai-2"),
    openai_sdk("openai-3"),
    Stack(
        "langchain",
        "python",
        "langchain_client.py",
        (
            Way("whole", LANGCHAIN, LANGCHAIN_WHOLE),
            Way("streamed", LANGCHAIN, OPENAI_STREAM),
            Way("async", LANGCHAIN, LANGCHAIN_WHOLE),
            Way("async streamed", LANGCHAIN, OPENAI_STREAM),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "litellm",
        "python",
        "litellm_client.py",
        (
            Way("whole", LITELLM, LITELLM_WHOLE),
            Way("streamed", LITELLM, LITELLM_STREAM),
            Way("async", LITELLM, LITELLM_WHOLE),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "llama-index",
        "python",
        "llama_index_client.py",
        (
            Way("whole", frozenset({"text", "finish", "calls", "usage"}), OPENAI),
            Way("streamed", frozenset({"text", "calls"}), OPENAI_STREAM),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "pydantic-ai",
        "python",
        "pydantic_ai_client.py",
        (
            Way("whole", PYDANTIC_AI, PYDANTIC_AI_WHOLE),
            Way("streamed", PYDANTIC_AI, PYDANTIC_AI_STREAM),
        ),
        tools=("tools", "tools streamed"),
        shapes=("shape",),
    ),
    Stack(
        "instructor",
        "python",
        "instructor_client.py",
        (Way("whole", frozenset({"text", "usage"}), OPENAI),),
        shapes=("shape", "shape streamed"),
    ),
    Stack(
        "llm",
        "python",
        "llm_client.py",
        (Way("whole", TERSE, OPENAI), Way("streamed", TERSE, OPENAI_STREAM)),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "smolagents",
        "python",
        "smolagents_client.py",
        (Way("whole", TERSE, OPENAI), Way("streamed", TERSE, OPENAI_STREAM)),
        agents=("tools",),
    ),
)

# Node tells classes by their bare names.
NODE_OPENAI = failing("BadRequestError 400", "InternalServerError 500", "InternalServerError 503")
NODE_OPENAI_STREAM = failing(*["APIError"] * 3)
# Of fields it does not know this helper keeps the last piece.
NODE_HELPER = ALL - {"thought"}


def openai_node(name: str) -> Stack:
    """A major version of the openai SDK in Node."""
    return Stack(
        name,
        "node",
        "openai.mjs",
        (
            Way("whole", ALL, NODE_OPENAI),
            Way("streamed", ALL, NODE_OPENAI_STREAM),
            Way("helper", NODE_HELPER, NODE_OPENAI_STREAM),
        ),
        tools=("tools",),
        agents=("tools helper",),
        shapes=("shape",),
        lists_models=True,
    )


AI_SDK = ALL - {"files"}
AI_SDK_SHOWS = {
    "compatible": AI_SDK - {"cited", "pictures"},
    "openai": AI_SDK - {"thought", "pictures"},
    "openrouter": AI_SDK,
}
AI_SDK_WHOLE = failing("APICallError 400", "APICallError 500", "APICallError 503")
AI_SDK_OPENAI_STREAM = failing(*["APICallError 500"] * 3)


def ai_sdk(name: str, stream: Mapping[str, str]) -> Stack:
    """A major version of Vercel's AI SDK; `stream` is what two of its providers raise in one."""
    streams = {"compatible": stream, "openai": AI_SDK_OPENAI_STREAM, "openrouter": stream}
    return Stack(
        name,
        "node",
        "ai.mjs",
        (
            *(Way(f"whole {by}", shows, AI_SDK_WHOLE) for by, shows in AI_SDK_SHOWS.items()),
            *(Way(f"streamed {by}", AI_SDK_SHOWS[by], raises) for by, raises in streams.items()),
        ),
        tools=tuple(f"tools {how} {by}" for how in ("whole", "streamed") for by in streams),
        shapes=tuple(f"shape {by}" for by in streams),
    )


NODE = (
    openai_node("openai-6"),
    openai_node("openai-7"),
    # The error of the frame as it stands, an object of no class.
    ai_sdk("ai-6", failing(*["Object"] * 3)),
    ai_sdk(
        "ai-7", failing("StreamProviderError", "StreamProviderError 500", "StreamProviderError")
    ),
    Stack(
        "langchain",
        "node",
        "langchain.mjs",
        (
            Way("whole", LANGCHAIN | {"thought"}, NODE_OPENAI),
            Way("streamed", LANGCHAIN | {"thought"}, NODE_OPENAI_STREAM),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
)

STACKS = (*PYTHON, *NODE)
