"""Sends the samples to the proxy, in both modes, and writes each result when it arrives."""

import asyncio
import base64
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from evaluation.http_client import HTTPClient, RequestError
from evaluation.results import (
    MODES,
    Failure,
    Mode,
    RequestKey,
    Result,
    ResultWriter,
    SandboxUse,
    Trajectory,
)
from evaluation.samples import Sample, Suite
from evaluation.trajectories import MALFORMED_ERRORS, replace_surrogates, trajectory_of
from evaluation.turns import with_turns

PLAIN_SUFFIX = ":plain"
"""The suffix of a model's name with which the proxy answers without a sandbox."""
OVERFLOW_CODE = "context_length_exceeded"
"""OpenAI's error code for a prompt that does not fit the context window. In the plain mode, the
proxy relays the backend's error unchanged, so its code may differ."""
OVERFLOW_STATUSES = (400, 413, 422)
OVERFLOW_WORDS = re.compile(
    r"context[ _](length|window|size|limit)|maximum (model|input|prompt|sequence) length"
    r"|(prompt|input|request)s? (is|are) too long|max_model_len",
    re.IGNORECASE,
)
SANDBOX_LOST_TEXT = (
    "Everything in the sandbox is lost: files, variables, running processes. The next command"
    " starts in a new one, which has nothing but the files the user gave."
)
"""The end of an observation after the sandbox has ended unexpectedly. Such an observation has no
exit code, unlike the observation of a command that prints the same text."""
MAX_CODE_CHARS = 100
"""Maximum length of a finish reason or an error code, which come from a server."""
MAX_DELAY_S = 60.0
"""Maximum delay before a retry, in seconds."""


class RunError(Exception):
    """The evaluation cannot run. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of an evaluation."""

    suites: Sequence[Suite]
    models: Sequence[str]
    modes: Sequence[Mode] = MODES
    repeats: int | None = None
    """Number of requests for each problem in each mode; None: by the protocol of its suite."""
    limit: int | None = None
    """The maximum number of samples of each domain; None: all. The kinds of a domain take turns, so
    that a low limit still includes many kinds. A higher limit keeps these samples and adds more."""
    sandbox: Mapping[str, Any] | None = None
    """Fields of the `sandbox` object of the requests with a sandbox. They replace those of the
    suite's protocol; a field that is None is not sent."""
    request: Mapping[str, Any] | None = None
    """Further fields of all requests, such as temperature. They replace those of the suite's
    protocol; a field that is None is not sent."""
    seed: int | None = None
    """The seed in the requests of the first repeat; each further repeat adds 1. None: not sent."""
    max_retries: int = 3
    capture_turns: bool = False
    """True to keep the turns of each run with a sandbox."""

    def samples(self) -> Iterator[tuple[Suite, Sample]]:
        """Yield the samples with their suites, up to `limit` samples of each domain, from the kinds
        of a domain in rotation."""
        of_kind, of_domain = Counter[tuple[str, str]](), Counter[str]()
        rounds: list[tuple[int, Suite, Sample]] = []
        for suite in self.suites:
            for sample in suite.samples:
                kind = (sample.domain, sample.kind)
                rounds.append((of_kind[kind], suite, sample))
                of_kind[kind] += 1
        for _, suite, sample in sorted(rounds, key=itemgetter(0)):
            of_domain[sample.domain] += 1
            if self.limit is None or of_domain[sample.domain] <= self.limit:
                yield suite, sample

    def planned_requests(self) -> "Iterator[PlannedRequest]":
        """Yield each request. For each model, the requests of one mode come before those
        of the next, so that the speeds of the modes can be compared."""
        samples = list(self.samples())
        repeats = max(map(self.repeats_of, self.suites), default=0)
        for model in self.models:
            for mode in self.modes:
                for repeat in range(repeats):
                    for suite, sample in samples:
                        if repeat < self.repeats_of(suite):
                            yield PlannedRequest(
                                RequestKey(model, mode, repeat, sample.id), suite, sample
                            )

    def repeats_of(self, suite: Suite) -> int:
        """Return the number of requests for each problem of a suite, in each mode."""
        return self.repeats or suite.manifest.protocol.repeats

    def request_fields_of(self, suite: Suite) -> dict[str, Any]:
        """Return the fields, such as temperature, that all requests of a suite have."""
        return _with_options(suite.manifest.protocol.request_fields(), self.request)

    def sandbox_fields_of(self, suite: Suite) -> dict[str, Any]:
        """Return the fields of the `sandbox` object of a suite's requests with a sandbox."""
        return _with_options(suite.manifest.protocol.sandbox, self.sandbox)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send."""

    key: RequestKey
    suite: Suite
    sample: Sample


class Runner:
    """Sends the requests of a plan."""

    def __init__(
        self,
        client: HTTPClient,
        plan: Plan,
        writer: ResultWriter,
        on_result: Callable[[Result], None],
        concurrency: int,
    ) -> None:
        """`on_result` is called after each written record. `concurrency` is the maximum number of
        requests at a time."""
        self._client = client
        self._plan = plan
        self._writer = writer
        self._on_result = on_result
        self._concurrency = concurrency

    async def check_models(self) -> None:
        """Raise RunError if the proxy does not answer, or does not serve a model in a mode."""
        try:
            body = await self._client.get("/models")
        except RequestError as error:
            raise RunError(f"{self._client.base_url} does not answer: {error}") from error
        try:
            served = {model["id"] for model in json.loads(body)["data"]}
            known = ", ".join(sorted(served)) or "none"
        except MALFORMED_ERRORS as error:
            url = f"{self._client.base_url}/models"
            raise RunError(f"{url} does not return a list of models.") from error
        for model in self._plan.models:
            for name in map(self._model_name, self._plan.modes, [model] * len(self._plan.modes)):
                if name not in served:
                    raise RunError(
                        f"The proxy does not serve the model {name}. Its models: {known}"
                    )

    async def run(self) -> None:
        """Send all requests that have no result yet, or whose result is an infrastructure error."""
        requests = (
            planned
            for planned in self._plan.planned_requests()
            if planned.key not in self._writer.done_keys
        )
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._send_requests(requests))
        except ExceptionGroup as errors:  # such as an input file that is missing
            raise errors.exceptions[0] from errors

    async def _send_requests(self, requests: Iterator[PlannedRequest]) -> None:
        for planned in requests:
            result, trajectory = await self._send_request(planned)
            self._writer.append(result, trajectory)
            self._on_result(result)

    async def _send_request(self, planned: PlannedRequest) -> tuple[Result, Trajectory | None]:
        """Send a request. Return the result, and the completion's trajectory or None.

        The request is sent again after a temporary error, and also if the proxy can no longer be
        reached when the turns of the run are read.
        """
        failures: list[Failure] = []
        first_started: str | None = None
        body = self._request_body(planned)
        while True:
            started, clock = datetime.now(UTC), time.perf_counter()
            fields = {
                **planned.key._asdict(),
                "seed": body.get("seed"),
                "started": started.isoformat(timespec="milliseconds"),
                "first_started": first_started,
                "concurrency": self._concurrency,
            }
            try:
                completion = json.loads(await self._client.post_json("/chat/completions", body))
                fields["latency_s"] = round(time.perf_counter() - clock, 3)
                # Validated, as a server may send anything, such as a null for a number.
                result = Result.model_validate(
                    {**fields, **_result_fields(planned.key.mode, completion, failures)}
                )
                trajectory = trajectory_of(result, completion)
                if self._plan.capture_turns and trajectory.run_id:
                    trajectory = await with_turns(self._client, trajectory)
                return result, trajectory
            except (RequestError, *MALFORMED_ERRORS) as error:
                failures.append(_failure(error))
                delay_s = _retry_delay_s(error, len(failures))
                if delay_s is not None and len(failures) <= self._plan.max_retries:
                    first_started = first_started or fields["started"]
                    await asyncio.sleep(delay_s)
                    continue
                fields["latency_s"] = round(time.perf_counter() - clock, 3)
                is_overflow = failures[-1].code == OVERFLOW_CODE
                status = "context_overflow" if is_overflow else "infra_error"
                return Result.model_validate(
                    {**fields, "status": status, "failures": failures}
                ), None

    def _model_name(self, mode: Mode, model: str) -> str:
        return model + PLAIN_SUFFIX if mode == "plain" else model

    def _request_body(self, planned: PlannedRequest) -> dict[str, Any]:
        """Return the body of a request."""
        plan, sample = self._plan, planned.sample
        texts = {file.name: planned.suite.read(file) for file in sample.files}
        body = plan.request_fields_of(planned.suite)
        body["model"] = self._model_name(planned.key.mode, planned.key.model)
        if planned.key.mode == "plain":
            content: Any = plain_prompt(sample.plain_problem or sample.problem, texts)
        else:
            content = [*map(_file_part, texts, texts.values())]
            content.append({"type": "text", "text": sample.problem})
            # By default, the proxy runs each of these requests with a sandbox, or refuses it.
            sandbox = plan.sandbox_fields_of(planned.suite)
            body["sandbox"] = {"enabled": "always", **sandbox, "steps": "events"}
            if plan.capture_turns:
                body["sandbox"]["capture"] = "messages"
        if plan.seed is not None:
            body["seed"] = plan.seed + planned.key.repeat
        return {**body, "messages": [{"role": "user", "content": content}]}


def _with_options(fields: Mapping[str, Any], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields, overridden and extended by the options, without fields that are None."""
    both = {**fields, **(options or {})}
    return {name: value for name, value in both.items() if value is not None}


def plain_prompt(problem: str, texts: Mapping[str, str]) -> str:
    """Return the prompt of the plain mode: the files as documents, then the problem."""
    documents = [
        f"BEGIN DOCUMENT {name}\n{text}\nEND DOCUMENT {name}\n\n" for name, text in texts.items()
    ]
    return "".join([*documents, problem])


def _file_part(name: str, text: str) -> dict[str, Any]:
    data = base64.b64encode(text.encode()).decode()
    file = {"filename": name, "file_data": f"data:text/plain;base64,{data}"}
    return {"type": "file", "file": file}


def _result_fields(
    mode: Mode, completion: Mapping[str, Any], failures: Sequence[Failure]
) -> dict[str, Any]:
    """Return the fields of a result that come from a completion. `failures` are those of earlier
    attempts. Raises the errors of MALFORMED_ERRORS."""
    choice = completion["choices"][0]
    usage = completion.get("usage")
    fields: dict[str, Any] = {
        "status": "answered",
        "answer": replace_surrogates(choice["message"].get("content") or ""),
        "finish_reason": replace_surrogates(choice.get("finish_reason") or "")[:MAX_CODE_CHARS],
        "failures": failures,
        "prompt_tokens": usage["prompt_tokens"] if usage else 0,
        "completion_tokens": usage["completion_tokens"] if usage else 0,
    }
    if mode == "sandbox":
        sandbox, stats = completion["sandbox"], completion["usage"]["sandbox"]
        fields["sandbox"] = _sandbox_use(sandbox, stats)
        if _is_sandbox_lost(sandbox):
            lost = Failure(code="sandbox_lost", message="The run lost its sandbox.")
            fields |= {"status": "infra_error", "failures": [*failures, lost]}
    return fields


def _sandbox_use(sandbox: Mapping[str, Any], stats: Mapping[str, Any]) -> SandboxUse:
    ends = [event for event in sandbox["events"] if event["kind"] == "tool_end"]
    return SandboxUse(
        stop_reason=sandbox["stop_reason"],
        route=sandbox["route"],
        turns=stats["turns"],
        model_calls=stats["llm_calls"],
        tool_calls=stats["commands"],
        failed_tool_calls=sum(bool(event["exit_code"]) for event in ends),
        observation_tokens=stats["env_tokens"],
        trajectory_tokens=stats["trajectory_tokens"],
        capability_turns={name: use["turns"] for name, use in stats["capabilities"].items()},
    )


def _is_sandbox_lost(sandbox: Mapping[str, Any]) -> bool:
    warnings = [warning["code"] for warning in sandbox.get("warnings") or ()]
    without_exit_code = (
        event.get("observation") or ""
        for event in sandbox["events"]
        if event["kind"] == "tool_end" and event["exit_code"] is None
    )
    return "sandbox_lost" in warnings or any(
        text.rstrip().endswith(SANDBOX_LOST_TEXT) for text in without_exit_code
    )


def _failure(error: Exception) -> Failure:
    message = replace_surrogates(str(error))[:1000]
    if not isinstance(error, RequestError):
        return Failure(code="bad_response", message=f"{type(error).__name__}: {message}")
    code = OVERFLOW_CODE if _is_context_overflow(error) else replace_surrogates(error.code)
    return Failure(status=error.status, code=code[:MAX_CODE_CHARS], message=message)


def _is_context_overflow(error: RequestError) -> bool:
    """Return True if a server refuses a request because it does not fit the context window."""
    if error.code == OVERFLOW_CODE:
        return True
    return error.status in OVERFLOW_STATUSES and bool(OVERFLOW_WORDS.search(str(error)))


def _retry_delay_s(error: Exception, failures: int) -> float | None:
    """Return the seconds until a retry, or None if a retry is useless."""
    delay_s = min(2.0 ** (failures - 1), MAX_DELAY_S)
    if not isinstance(error, RequestError):
        return None
    if error.status is None:
        return delay_s
    is_temporary = error.status in (408, 409, 429) or error.status >= 500
    if not is_temporary or error.headers.get("x-should-retry") == "false":
        return None
    try:
        return min(max(delay_s, float(error.headers.get("retry-after", 0))), MAX_DELAY_S)
    except ValueError:  # a date
        return delay_s
