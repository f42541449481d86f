"""A language model that answers without delay, or after a number of seconds:
`python -m bench.instant_model PORT [SECONDS]`.

A request with tools gets the next call of the script that the model's name selects, with token ids
and log probabilities if it asks for them. Any other request gets one short answer, in 64 chunks if
streamed. Uses bare asyncio so that the backend never limits a relay.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from bench.processes import raise_open_file_limit

CHUNK_COUNT = 64
ANSWER = "42"
RESPONSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: "
THREE_TURN_MODEL, FIVE_TURN_MODEL = "bench", "math5"
PROGRAM_FILE = "/testbed/solve.py"
PRINT_COMMAND = "python3 -c 'print(6 * 7)'"
RUN_COMMAND = f"python3 {PROGRAM_FILE}"
PROGRAM = "print(6 * 7)\n"
FIRST_PROMPT_TOKENS, REPLY_TOKENS, OBSERVATION_TOKENS = 1500, 60, 60
"""Numbers of tokens of the first prompt, of each reply and of each observation, as in short
runs."""
VOCABULARY_SIZE, TOKEN_STEP = 151_936, 7919
"""The token ids are multiples of TOKEN_STEP modulo the size of Qwen3's vocabulary."""
Call = tuple[str, dict[str, Any]]
WriteAnswer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
"""A function that writes the response to a request body."""
SUBMIT_CALL: Call = ("submit", {})


def _create_call(path: str, text: str) -> Call:
    return "str_replace_editor", {"command": "create", "path": path, "file_text": text}


WRITE_CALL = _create_call("/testbed/output/answer.txt", ANSWER)
SCRIPTS: Mapping[str, tuple[Call, ...]] = {
    THREE_TURN_MODEL: (("execute_bash", {"command": "echo $((6 * 7))"}), WRITE_CALL, SUBMIT_CALL),
    FIVE_TURN_MODEL: (
        ("execute_bash", {"command": PRINT_COMMAND}),
        _create_call(PROGRAM_FILE, PROGRAM),
        ("execute_bash", {"command": RUN_COMMAND}),
        WRITE_CALL,
        SUBMIT_CALL,
    ),
}


def completion(message: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a completion with one message."""
    return {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 0,
        "model": "bench",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def call_completion(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a completion with one tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return completion(message, "tool_calls")


def _with_tokens(turn: int, value: dict[str, Any]) -> dict[str, Any]:
    """Return a completion with token ids and log probabilities, as vLLM sends them. Each prompt
    begins with all tokens of the call before, as in a run whose history is append-only."""
    start = FIRST_PROMPT_TOKENS + turn * (REPLY_TOKENS + OBSERVATION_TOKENS)
    ids = [number * TOKEN_STEP % VOCABULARY_SIZE for number in range(start + REPLY_TOKENS)]
    logprobs: list[dict[str, Any]] = [
        {"token": "token", "logprob": -0.1234567 * number, "bytes": None, "top_logprobs": []}
        for number in range(REPLY_TOKENS)
    ]
    (choice,) = value["choices"]
    sampled = {"token_ids": ids[start:], "logprobs": {"content": logprobs}}
    return {**value, "prompt_token_ids": ids[:start], "choices": [{**choice, **sampled}]}


def json_response(value: Any) -> bytes:
    """Return the bytes of an HTTP response with a JSON body."""
    body = json.dumps(value).encode()
    return RESPONSE_HEAD + b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _http_chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _chunk(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f"word {number} "}, "finish_reason": None}
    return _http_chunk(
        json.dumps({**completion({}, ""), "object": "chat.completion.chunk", "choices": [choice]})
    )


MODELS_RESPONSE = json_response(
    {"object": "list", "data": [{"id": name, "object": "model"} for name in SCRIPTS]}
)
TURNS = {name: [call_completion(*each) for each in script] for name, script in SCRIPTS.items()}
TURN_RESPONSES = {name: [json_response(each) for each in turns] for name, turns in TURNS.items()}
TOKEN_RESPONSES = {
    name: [json_response(_with_tokens(turn, each)) for turn, each in enumerate(turns)]
    for name, turns in TURNS.items()
}
SHORT_RESPONSE = json_response(
    completion({"role": "assistant", "content": "word " * CHUNK_COUNT}, "stop")
)
STREAM_HEAD = RESPONSE_HEAD + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_CHUNKS = [_chunk(number) for number in range(CHUNK_COUNT)]
STREAM_END = _http_chunk("[DONE]") + b"0\r\n\r\n"


async def serve(
    answer: WriteAnswer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one keep-alive connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                writer.write(MODELS_RESPONSE)
                continue
            if head.startswith(b"head"):  # the proxy keeps a connection open by it
                writer.write(MODELS_RESPONSE.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                continue
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await answer(json.loads(await reader.readexactly(length)), writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def _answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if body.get("tools"):
        said = sum(message["role"] == "assistant" for message in body["messages"])
        responses = TOKEN_RESPONSES if body.get("return_token_ids") else TURN_RESPONSES
        turns = responses[body["model"]]
        writer.write(turns[min(said, len(turns) - 1)])
    elif not body.get("stream"):
        writer.write(SHORT_RESPONSE)
    else:
        writer.write(STREAM_HEAD)
        for chunk in STREAM_CHUNKS:
            writer.write(chunk)
            await asyncio.sleep(0)  # each its own packet, as from a model
        writer.write(STREAM_END)


async def _answer_after(delay_s: float, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(delay_s)
    await _answer(body, writer)


async def _main(port: int, delay_s: float) -> None:
    raise_open_file_limit()
    answer = partial(_answer_after, delay_s) if delay_s else _answer
    server = await asyncio.start_server(partial(serve, answer), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 0.0))
