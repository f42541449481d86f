"""A scripted model with known behaviour, as an OpenAI-compatible server.

The model knows the samples of the generated suites. BEHAVIOURS says for each kind of problem what
the model does without and with tools. The results of an evaluation follow from BEHAVIOURS.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from aiohttp import web

from evaluation.samples import Sample

MODEL_NAME = "scripted-model"
WINDOW_CHARS = 40_000
"""Maximum length of a prompt. A longer prompt is refused, as by a model with a small context
window."""
CHARS_PER_TOKEN = 4
SYSTEM_TOKENS = 100
"""The token count of every system message, whatever its length, because the text depends on the
machine. The count is so low that the proxy's estimates use their minimum of tokens per byte, and
so do not depend on the text either."""
ANSWER_PREAMBLE = "1. I worked it out.\n2. I checked it."
"""The text before a right answer in prose. The report counts one word of verification and two marks
of structure in it."""
CHECK_PREAMBLE = "1. I run a program.\n2. I verify its output."
"""The text before the commands of the conduct `checks`. The report counts one word of verification
and two marks of structure in it."""
SOLVE = "mkdir -p /testbed/output\n{{ {solution}\n}} > /testbed/output/answer.txt"
"""A command that runs a solution. The model submits the file that the command writes, so that the
answer really comes from the command."""
# The outputs of these commands are the same on each machine.
STUMBLE = (
    "cat /testbed/documents/missing.txt 2> /dev/null || { echo 'There is no such file.'; false; }"
)
INSTALL = (
    "pip install --no-index no-such-package > /dev/null 2>&1 || echo 'There is no such package.'"
)
CHECK = "cat /testbed/output/answer.txt"
WANDERINGS = ("ls -d /testbed", "true")
UNFORMATTED_ANSWER = "I counted twice.\nThe first time it was 7, the second time 8."
UNKNOWN_ANSWER = "I do not know."
MAX_BODY_BYTES = 64 * 2**20

PlainConduct = Literal["right", "wrong", "unformatted"]
ToolConduct = Literal["computes", "stumbles", "installs", "checks", "guesses", "wanders", "fails"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The conduct of the model for one kind of problem."""

    plain: PlainConduct
    """The reply without tools: the right answer, a wrong answer, or prose without the form of an
    answer."""
    tools: ToolConduct
    """The conduct with tools. computes: run the solution, then submit its output. stumbles: the
    same after a command that fails. installs: the same after an attempt to install a package.
    checks: run the solution and read its output in one turn, then submit. guesses: submit
    a wrong answer at once. wanders: look around or do nothing in turns, and never submit. fails:
    the server answers with status 500."""


BEHAVIOURS: Mapping[str, Behaviour] = {
    # computation
    "addition": Behaviour("right", "computes"),
    "multiplication": Behaviour("wrong", "checks"),
    "power": Behaviour("wrong", "installs"),
    "letters": Behaviour("unformatted", "wanders"),
    # files
    "total": Behaviour("wrong", "stumbles"),
    "join": Behaviour("wrong", "checks"),
    "log": Behaviour("right", "computes"),
    # long-documents: all plain prompts are longer than WINDOW_CHARS
    "code": Behaviour("right", "computes"),
    "hop": Behaviour("right", "checks"),
    "mentions": Behaviour("right", "guesses"),
    # formats
    "record": Behaviour("right", "computes"),
    "table": Behaviour("unformatted", "checks"),
    "lines": Behaviour("right", "guesses"),
    # reasoning-gym
    "chain_sum": Behaviour("right", "computes"),
    "gcd": Behaviour("right", "checks"),
    "count_primes": Behaviour("wrong", "computes"),
    "spell_backward": Behaviour("wrong", "computes"),
    "letter_counting": Behaviour("wrong", "computes"),
    "base_conversion": Behaviour("right", "computes"),
    "prime_factorization": Behaviour("wrong", "wanders"),
    "calendar_arithmetic": Behaviour("wrong", "fails"),
}


class ServerError(Exception):
    """The scripted server answers with an HTTP error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "server_error", "code": code}}


class ScriptedModel:
    """Answers chat requests about the samples of a suite. It keeps no state: the reply depends on
    the request's messages only."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the assistant message for a chat request. Raises ServerError."""
        messages = body["messages"]
        text = "\n".join(map(_text_of, messages))
        if len(text) > WINDOW_CHARS:
            message = f"The prompt has more than {WINDOW_CHARS} characters."
            raise ServerError(400, "context_length_exceeded", message)
        sample = self.sample_of(body)
        behaviour = BEHAVIOURS[sample.kind]
        if body.get("tools"):
            return self._tool_reply(sample, behaviour.tools, messages)
        if any(message["role"] == "assistant" for message in messages):
            return _text_message(UNKNOWN_ANSWER)  # the proxy's last question to a run at its limit
        return _plain_reply(sample, behaviour.plain)

    def sample_of(self, body: Mapping[str, Any]) -> Sample:
        """Return the sample that a request is about. Raises ServerError if there is none."""
        text = "\n".join(_text_of(each) for each in body["messages"] if each["role"] == "user")
        for sample in self._samples:
            if sample.problem in text:
                return sample
        raise ServerError(400, "unknown_problem", "The request is about no sample.")

    def _tool_reply(
        self, sample: Sample, behaviour: ToolConduct, messages: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        number = sum(each["role"] == "tool" for each in messages)
        match behaviour:
            case "fails":
                raise ServerError(500, "scripted_failure", "The script demands a failure.")
            case "guesses":
                return _call_message(_call(0, "submit", answer=_wrong_answer(sample)))
            case "wanders":
                command = f"{WANDERINGS[number % len(WANDERINGS)]} # {number}"
                return _call_message(_call(number, "execute_bash", command=command))
        turns, done = _solving_turns(sample, behaviour), _turns_done(messages)
        if done == len(turns):
            return _call_message(_call(number, "submit"))
        calls = [
            _call(number + index, "execute_bash", command=command)
            for index, command in enumerate(turns[done])
        ]
        return _call_message(*calls, text=CHECK_PREAMBLE if behaviour == "checks" else None)


@asynccontextmanager
async def serve_model(
    reply: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> AsyncIterator[str]:
    """Serve a model on a free port of the loopback interface; yield its URL, with /v1. `reply`
    returns the assistant message for the body of a chat request, or raises ServerError."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            message = await reply(body)
        except ServerError as error:
            return web.json_response(error.body, status=error.status)
        completion = _completion(body, message)
        if not body.get("stream"):
            return web.json_response(completion)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in _chunks(completion):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.Response:
        entry = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "script"}
        return web.json_response({"object": "list", "data": [entry]})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _plain_reply(sample: Sample, behaviour: PlainConduct) -> dict[str, Any]:
    if behaviour == "unformatted":
        return _text_message(UNFORMATTED_ANSWER)
    if behaviour == "wrong":
        return _text_message(_wrong_answer(sample))
    if sample.grader in ("json", "verbatim"):
        return _text_message(sample.ground_truth)
    return _text_message(f"{ANSWER_PREAMBLE}\n\nAnswer: {sample.ground_truth}")


def _wrong_answer(sample: Sample) -> str:
    """Return a wrong answer in the form that the problem asks for. No right answer is -1."""
    return "[-1]" if sample.grader == "json" else "Answer: -1"


def _text_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _solving_turns(sample: Sample, behaviour: ToolConduct) -> Sequence[Sequence[str]]:
    """Return the commands of each turn before the submission, for a conduct that solves the
    problem."""
    solve = SOLVE.format(solution=sample.solution)
    match behaviour:
        case "checks":
            return [[solve, CHECK]]
        case "stumbles":
            return [[STUMBLE], [solve]]
        case "installs":
            return [[INSTALL], [solve]]
    return [[solve]]


def _turns_done(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the model's turns in which no sandbox was lost. The model repeats the
    commands of a turn in which one was lost."""
    lost_calls: list[bool] = []
    for each in messages:
        if each["role"] == "assistant":
            lost_calls.append(False)
        elif each["role"] == "tool" and "sandbox is lost" in _text_of(each):
            lost_calls[-1] = True
    return lost_calls.count(False)


def _call(number: int, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _call_message(*calls: Mapping[str, Any], text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _completion(body: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    prompt_tokens, completion_tokens = (
        sum(map(_token_count, body["messages"])),
        _token_count(message),
    )
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _token_count(message: Mapping[str, Any]) -> int:
    """Return the token count of a message: the characters of its text and of the arguments of its
    tool calls divided by CHARS_PER_TOKEN, rounded up; SYSTEM_TOKENS for a system message."""
    if message["role"] == "system":
        return SYSTEM_TOKENS
    arguments = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
    return ceil(sum(map(len, [_text_of(message), *arguments])) / CHARS_PER_TOKEN)


def _chunks(completion: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a streamed completion: the message, the end, the usage."""
    common = {**completion, "object": "chat.completion.chunk", "usage": None}
    choice = completion["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {
            **common,
            "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
        },
        {**common, "choices": [], "usage": completion["usage"]},
    ]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or "" for part in content)
