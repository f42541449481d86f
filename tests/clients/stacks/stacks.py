"""The clients: what each shows of an answer, and what it raises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.steps import StepsMode

ALL = frozenset({"text", "finish", "calls", "thought", "usage", "cited", "pictures", "files"})

Failing = Literal["refused", "broken", "cut", "unavailable"]


@dataclass(frozen=True)
class Way:
    """One way to ask."""

    name: str
    shows: frozenset[str]
    raises: Mapping[str, str]
    """The type, and the status where the client tells it, by scenario."""
    thinks: frozenset[StepsMode] = frozenset({"reasoning"})
    """The profiles in which steps are among the thinking."""
    late: str = ""
    """What is raised instead once something was shown, where that is another.

    A client that knows the two apart waits a moment of its own (AI SDK 7: 50 ms) after the
    stream has begun. A fault that comes before anything is shown may come after that moment.
    """

    def raises_at(self, profile: StepsMode) -> Mapping[str, frozenset[str]]:
        """What may be raised where steps show in that profile, by scenario."""
        may_be = {fault: frozenset({kind}) for fault, kind in self.raises.items()}
        if self.late:
            is_shown = profile in self.thinks
            unavailable = frozenset({self.late} if is_shown else {self.raises["cut"], self.late})
            may_be |= {"cut": frozenset({self.late}), "unavailable": unavailable}
        return may_be

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
    has_shell: bool = False
    """Whether it can ask for a hosted shell, and shows its items."""
    shows_calls: bool = False
    """The same where it shows calls and what came of them instead."""

    def __str__(self) -> str:
        return f"{self.language}-{self.name}"


def failing(refused: str, broken: str, unavailable: str) -> dict[str, str]:
    """What is raised when the backend refuses, when it fails, and when no computer is to be had."""
    return {"refused": refused, "broken": broken, "cut": broken, "unavailable": unavailable}


def streaming(whole: Mapping[str, str], begun: Mapping[str, str]) -> dict[str, str]:
    """What is raised of a stream: before it has begun what is of an answer in one piece."""
    return {**begun, "refused": whole["refused"], "broken": whole["broken"]}


# The openai SDK, and what stands on it. Once a stream has begun there is no status any more.
OPENAI = failing(
    "openai.BadRequestError 400",
    "openai.InternalServerError 500",
    "openai.InternalServerError 503",
)
OPENAI_STREAM = streaming(OPENAI, failing(*["openai.APIError"] * 3))
# Its helper keeps of the frames what belongs to a choice.
HELPER = ALL - {"files"}


RESPONSES = frozenset({"text", "finish", "calls", "thought", "usage", "files"})


def responses(
    name: str, raises: Mapping[str, str], shows: frozenset[str] = RESPONSES, late: str = ""
) -> Way:
    """A way by the Responses API, where items of a hosted tool come to who asked for it alone."""
    return Way(name, shows, raises, frozenset({"reasoning", "items"}), late)


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
            responses("responses", OPENAI),
            responses("responses streamed", OPENAI_STREAM),
            responses("responses helper", OPENAI_STREAM),
            responses("responses async streamed", OPENAI_STREAM),
        ),
        tools=("tools", "tools helper", "responses tools"),
        shapes=("shape", "shape helper", "responses shape"),
        lists_models=True,
        has_shell=True,
    )


LANGCHAIN = frozenset({"text", "finish", "calls", "usage"})
LANGCHAIN_ERRORS = "langchain_openai.chat_models.base."
LANGCHAIN_WHOLE = failing(
    f"{LANGCHAIN_ERRORS}OpenAIInvalidRequestError 400",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 500",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 503",
)
LANGCHAIN_ANTHROPIC = failing(
    "langchain_anthropic.chat_models.AnthropicInvalidRequestError 400",
    "langchain_anthropic.chat_models.AnthropicAPIError 500",
    "langchain_anthropic.chat_models.AnthropicAPIError 503",
)
LANGCHAIN_STREAM = streaming(LANGCHAIN_WHOLE, OPENAI_STREAM)
LITELLM = ALL - {"files"}
LITELLM_WHOLE = failing(
    "litellm.exceptions.BadRequestError 400",
    "litellm.exceptions.InternalServerError 500",
    "litellm.exceptions.ServiceUnavailableError 503",
)
LITELLM_STREAM = streaming(
    LITELLM_WHOLE, failing(*["litellm.exceptions.MidStreamFallbackError 500"] * 3)
)
PYDANTIC_AI = frozenset({"text", "finish", "calls", "thought", "usage"})
PYDANTIC_AI_WHOLE = failing(
    "pydantic_ai.exceptions.ModelRequestRejectedError 400",
    "pydantic_ai.exceptions.ModelServerError 500",
    "pydantic_ai.exceptions.ModelUnavailableError 503",
)
# It takes the code of an error in the stream for a status where it is a number.
PYDANTIC_AI_STREAM = streaming(
    PYDANTIC_AI_WHOLE,
    failing(
        "pydantic_ai.exceptions.ModelAPIError",
        "pydantic_ai.exceptions.ModelServerError 500",
        "pydantic_ai.exceptions.ModelAPIError",
    ),
)
TERSE = frozenset({"text", "calls", "usage"})

# Anthropic's SDK: no citations and no pictures, for which its answers have no place.
ANTHROPIC = ALL - {"cited", "pictures"}
ANTHROPIC_WHOLE = failing(
    "anthropic.BadRequestError 400",
    "anthropic.InternalServerError 500",
    "anthropic.ServiceUnavailableError 503",
)
ANTHROPIC_STREAM = streaming(ANTHROPIC_WHOLE, failing(*["anthropic.APIStatusError 200"] * 3))
LANGCHAIN_ANTHROPIC_STREAM = streaming(LANGCHAIN_ANTHROPIC, ANTHROPIC_STREAM)

PYTHON = (
    openai_sdk("openai-2"),
    openai_sdk("openai-3"),
    Stack(
        "langchain",
        "python",
        "langchain_client.py",
        (
            Way("whole", LANGCHAIN, LANGCHAIN_WHOLE),
            Way("streamed", LANGCHAIN, LANGCHAIN_STREAM),
            Way("async", LANGCHAIN, LANGCHAIN_WHOLE),
            Way("async streamed", LANGCHAIN, LANGCHAIN_STREAM),
            responses("responses", LANGCHAIN_WHOLE, LANGCHAIN),
            responses("responses streamed", LANGCHAIN_STREAM, LANGCHAIN),
            Way("anthropic", LANGCHAIN, LANGCHAIN_ANTHROPIC),
            Way("anthropic streamed", LANGCHAIN, LANGCHAIN_ANTHROPIC_STREAM),
        ),
        tools=("tools", "responses tools", "anthropic tools"),
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
            responses("responses", PYDANTIC_AI_WHOLE, PYDANTIC_AI),
            responses("responses streamed", PYDANTIC_AI_STREAM, PYDANTIC_AI),
        ),
        tools=("tools", "tools streamed", "responses tools"),
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
    Stack(
        "anthropic",
        "python",
        "anthropic_client.py",
        (
            Way("whole", ANTHROPIC, ANTHROPIC_WHOLE),
            Way("streamed", ANTHROPIC, ANTHROPIC_STREAM),
            Way("helper", ANTHROPIC - {"files"}, ANTHROPIC_STREAM),
            Way("async", ANTHROPIC, ANTHROPIC_WHOLE),
            Way("async streamed", ANTHROPIC, ANTHROPIC_STREAM),
            Way("async helper", ANTHROPIC - {"files"}, ANTHROPIC_STREAM),
            Way("beta", ANTHROPIC, ANTHROPIC_WHOLE),
        ),
        tools=("tools", "tools helper"),
        agents=("tool runner",),
        shapes=("shape", "shape helper"),
        lists_models=True,
    ),
)

# Node tells classes by their bare names.
NODE_OPENAI = failing("BadRequestError 400", "InternalServerError 500", "InternalServerError 503")
NODE_OPENAI_STREAM = streaming(NODE_OPENAI, failing(*["APIError"] * 3))
NODE_ANTHROPIC = failing(
    "BadRequestError 400", "InternalServerError 500", "ServiceUnavailableError 503"
)
NODE_ANTHROPIC_STREAM = streaming(NODE_ANTHROPIC, failing(*["APIError"] * 3))
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
            responses("responses", NODE_OPENAI),
            responses("responses streamed", NODE_OPENAI_STREAM),
            responses("responses helper", NODE_OPENAI_STREAM),
        ),
        tools=("tools", "responses tools"),
        agents=("tools helper",),
        shapes=("shape",),
        lists_models=True,
        has_shell=True,
    )


AI_SDK = ALL - {"files"}
AI_SDK_SHOWS = {
    "compatible": AI_SDK - {"cited", "pictures"},
    "openai": AI_SDK - {"thought", "pictures"},
    "openrouter": AI_SDK,
    "anthropic": AI_SDK - {"cited", "pictures"},
}
AI_SDK_RESPONSES = AI_SDK - {"cited", "pictures"}
AI_SDK_WHOLE = failing("APICallError 400", "APICallError 500", "APICallError 503")
AI_SDK_OPENAI_STREAM = streaming(AI_SDK_WHOLE, failing(*["APICallError 500"] * 3))


def ai_sdk(name: str, stream: Mapping[str, str], late: str, anthropic: Mapping[str, str]) -> Stack:
    """A major version of Vercel's AI SDK; `stream` is what two of its providers raise in one,
    `late` what the Responses API's does once something was shown, `anthropic` what Anthropic's."""
    streams = {
        "compatible": streaming(AI_SDK_WHOLE, stream),
        "openai": AI_SDK_OPENAI_STREAM,
        "openrouter": streaming(AI_SDK_WHOLE, stream),
        "anthropic": streaming(AI_SDK_WHOLE, anthropic),
    }
    providers = (*streams, "responses")
    return Stack(
        name,
        "node",
        "ai.mjs",
        (
            *(Way(f"whole {by}", shows, AI_SDK_WHOLE) for by, shows in AI_SDK_SHOWS.items()),
            *(Way(f"streamed {by}", AI_SDK_SHOWS[by], raises) for by, raises in streams.items()),
            responses("whole responses", AI_SDK_WHOLE, AI_SDK_RESPONSES),
            responses("streamed responses", AI_SDK_OPENAI_STREAM, AI_SDK_RESPONSES, late),
        ),
        tools=tuple(f"tools {how} {by}" for how in ("whole", "streamed") for by in providers),
        shapes=tuple(f"shape {by}" for by in providers),
        shows_calls=True,
    )


NODE = (
    openai_node("openai-6"),
    openai_node("openai-7"),
    # The error of the frame as it stands, an object of no class.
    ai_sdk("ai-6", failing(*["Object"] * 3), "Object 500", failing(*["Object"] * 3)),
    # It makes a status of the type of an error of Anthropic's.
    ai_sdk(
        "ai-7",
        failing("StreamProviderError", "StreamProviderError 500", "StreamProviderError"),
        "StreamProviderError 500",
        failing("StreamProviderError 400", "StreamProviderError 500", "StreamProviderError 529"),
    ),
    Stack(
        "anthropic",
        "node",
        "anthropic.mjs",
        (
            Way("whole", ANTHROPIC, NODE_ANTHROPIC),
            Way("streamed", ANTHROPIC, NODE_ANTHROPIC_STREAM),
            Way("helper", ANTHROPIC - {"files"}, NODE_ANTHROPIC_STREAM),
        ),
        tools=("tools",),
        agents=("tool runner",),
        shapes=("shape",),
        lists_models=True,
    ),
    Stack(
        "langchain",
        "node",
        "langchain.mjs",
        (
            Way("whole", LANGCHAIN | {"thought"}, NODE_OPENAI),
            Way("streamed", LANGCHAIN | {"thought"}, NODE_OPENAI_STREAM),
            responses("responses", NODE_OPENAI, LANGCHAIN),
            responses("responses streamed", NODE_OPENAI_STREAM, LANGCHAIN),
        ),
        tools=("tools", "responses tools"),
        shapes=("shape",),
    ),
)

STACKS = (*PYTHON, *NODE)
