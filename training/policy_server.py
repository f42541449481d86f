"""Serves the model that a trainer in the same process trains, for training on a CPU.

The server answers POST /v1/chat/completions with token ids and log probabilities, as vLLM does,
always with the current weights. The replies to requests that arrive together are generated as one
batch. For a GPU use vLLM.
"""

import json
import logging
import queue
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import torch

from training.turn_server import completion_of

log = logging.getLogger(__name__)

MAX_BATCH = 64
MAX_BODY_BYTES = 64 << 20
REPLY_TIMEOUT_S = 600.0
"""Maximum time of one reply, including the wait for its batch."""
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, Any]
    prompt_ids: list[int]
    max_tokens: int
    reply: "Future[tuple[list[int], list[float]]]" = field(default_factory=Future)


class PolicyServer:
    """Serves a model of transformers on a port of the loopback interface, during a `with`
    block."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "policy",
        port: int = 0,
        max_tokens: int = 64,
        batch_wait_s: float = 0.02,
    ) -> None:
        """`max_tokens` is the limit of a reply if the request has none. `batch_wait_s` is the time
        to wait for each further request of a batch."""
        self.name = name
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer
        self._model = model
        self._batch_wait_s = batch_wait_s
        self._queue: queue.Queue[_Request | None] = queue.Queue()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.policy = self
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="policy server"),
            threading.Thread(target=self._generate_batches, name="policy generation"),
        ]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat completion for a request."""
        prompt_ids = self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
        )
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_tokens
        request = _Request(body, list(prompt_ids), int(limit))
        self._queue.put(request)
        reply_ids, logprobs = request.reply.result(REPLY_TIMEOUT_S)
        return self._completion(request, reply_ids, logprobs)

    def _completion(
        self, request: _Request, reply_ids: list[int], logprobs: list[float]
    ) -> dict[str, Any]:
        is_complete = bool(reply_ids) and reply_ids[-1] == self.tokenizer.eos_token_id
        message = _message(self.tokenizer.decode(reply_ids, skip_special_tokens=True))
        reason = "tool_calls" if "tool_calls" in message else "stop" if is_complete else "length"
        completion = completion_of(message, reason, self.name)
        completion["usage"] = {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(reply_ids),
            "total_tokens": len(request.prompt_ids) + len(reply_ids),
        }
        choice = completion["choices"][0]
        if request.body.get("logprobs"):
            tokens = self.tokenizer.convert_ids_to_tokens(reply_ids)
            pairs = zip(tokens, logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token": t, "logprob": p} for t, p in pairs]}
        if request.body.get("return_token_ids"):
            completion["prompt_token_ids"] = request.prompt_ids
            choice["token_ids"] = reply_ids
        return completion

    # The thread that generates

    def _generate_batches(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                replies = self._sample_replies(batch)
            except Exception as error:
                log.exception("a batch failed")
                for request in batch:
                    request.reply.set_exception(error)
            else:
                for request, reply in zip(batch, replies, strict=True):
                    request.reply.set_result(reply)

    def _next_batch(self) -> list[_Request] | None:
        """Wait for a request, and return it with the following requests of the same temperature.
        Return None when the server ends."""
        first = self._queue.get()
        if first is None:
            return None
        batch, others = [first], list[_Request | None]()
        while len(batch) < MAX_BATCH:
            try:
                request = self._queue.get(timeout=self._batch_wait_s)
            except queue.Empty:
                break
            if request is not None and _temperature(request) == _temperature(first):
                batch.append(request)
                continue
            others.append(request)
            break
        for request in others:
            self._queue.put(request)
        return batch

    @torch.inference_mode()
    def _sample_replies(self, batch: Sequence[_Request]) -> list[tuple[list[int], list[float]]]:
        """Return the sampled tokens of each request, and their log probabilities at temperature
        1."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.tensor(
            [[pad] * (width - len(each.prompt_ids)) + each.prompt_ids for each in batch]
        )
        attention = torch.tensor(
            [[0] * (width - len(each.prompt_ids)) + [1] * len(each.prompt_ids) for each in batch]
        )
        temperature = _temperature(batch[0])
        was_training = self._model.training
        self._model.eval()  # without dropout, as the trainer's own log probabilities
        try:
            generated = self._model.generate(
                input_ids=ids,
                attention_mask=attention,
                max_new_tokens=max(request.max_tokens for request in batch),
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0,
                top_p=1.0,
                pad_token_id=pad,
                eos_token_id=eos,
                output_logits=True,
                return_dict_in_generate=True,
            )
        finally:
            self._model.train(was_training)
        sampled = generated.sequences[:, width:]
        logits = torch.stack(generated.logits, dim=1).float()
        logprobs = logits.log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        replies = []
        for request, tokens, values in zip(batch, sampled.tolist(), logprobs.tolist(), strict=True):
            length = min(len(tokens), request.max_tokens)
            if eos in tokens:
                length = min(length, tokens.index(eos) + 1)
            replies.append((tokens[:length], values[:length]))
        return replies


def _temperature(request: _Request) -> float:
    temperature = request.body.get("temperature")
    return 1.0 if temperature is None else float(temperature)


def _message(text: str) -> dict[str, Any]:
    """Return the message for a sampled text. The arguments of tool calls stay as the model wrote
    them."""
    calls = []
    for written in _TOOL_CALL.findall(text):
        named = _CALL_HEAD.match(written)
        if named is None or not written.rstrip().endswith("}"):
            continue
        arguments = written[named.end() :].rstrip()[:-1].rstrip()
        function = {"name": named[1], "arguments": arguments}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[: text.index("<tool_call>")], "tool_calls": calls}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    policy: PolicyServer

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a connection failed", exc_info=True)  # a client that ends resets its connections


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a connection without bytes
    server: _Server

    def do_GET(self) -> None:
        policy = self.server.policy
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": policy.name, "object": "model"}]})
        else:
            self._send(404, {"error": {"message": "There is no such path."}})

    def do_POST(self) -> None:
        policy = self.server.policy
        length = self.headers.get("content-length") or ""
        if self.path != "/v1/chat/completions":
            self._refuse(404, "There is no such path.")
            return
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._refuse(413, f"A body needs a content-length of at most {MAX_BODY_BYTES} bytes.")
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            self._refuse(400, "The body is not a JSON object with messages.")
            return
        if body.get("stream"):
            self._refuse(400, "This server does not stream.")
            return
        try:
            self._send(200, policy.complete(body))
        except Exception as error:
            log.exception("a request failed")
            self._send(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close the connection, as the body of the request may be unread."""
        self.close_connection = True
        self._send(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def _send(self, status: int, payload: Mapping[str, Any]) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write nothing."""
