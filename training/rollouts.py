"""Rollouts: runs of tasks through a proxy, with their tokens and their rewards.

A rollout that the infrastructure spoils (the proxy, the backend or the sandbox failed) is repeated.
If every repetition fails, it has no reward, so that a trainer leaves it out of its group. A mistake
that would spoil every rollout, such as a wrong key or a missing package of the grader, ends them
all with a RolloutError.
"""

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from training.convert import Placement, prompt_of
from training.rewards import Attempt, Reward, reward
from training.rows import TaskError, TaskRow

log = logging.getLogger(__name__)

INFRA_ERROR = "infra_error"
"""The outcome of a rollout that says nothing about the model."""
TIMEOUT_S = 5700.0
"""Maximum time of one rollout: 5,400 s for the run, as in the paper's training, and 300 s for
collecting its files. The profile's `limits.max_run_seconds` should be 5400."""
REQUEST_TIMEOUT_S = 60.0
MAX_PAUSE_DELAY_S = 10.0
PAUSE_TIMEOUT_S = 600.0
"""Time after which a pause ends by itself, so that a dead trainer does not stop the proxy."""
DRAIN_INTERVAL_S = 0.2
"""Time between two requests for the number of runs in progress."""
PAUSED_CODE = "runs_paused"
"""The code of the proxy's refusals during a pause."""
PERMANENT_STATUSES = frozenset({401, 403, 404, 405})
"""HTTP statuses that a repeated request would get again."""
Score = Callable[[TaskRow, Attempt], Reward]


class RolloutError(Exception):
    """The proxy refuses all rollouts, its backend sends no token ids, or the rewards cannot be
    computed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Successive model calls of a rollout as one row of tokens."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for each sampled token, 0 for the others."""
    logprobs: list[float]
    """The log probability of each sampled token, and 0.0 for tokens that were not sampled."""

    @property
    def sampled_count(self) -> int:
        """The number of sampled tokens."""
        return sum(self.response_mask)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a task."""

    task_id: str
    group_id: str
    outcome: str
    """The stop reason of the run, or INFRA_ERROR."""
    reward: float | None
    """The reward from 0 to 1; None if the run cannot be scored."""
    trajectory_id: str | None = None
    """The id of the trajectory in the proxy; None if a request of the last attempt failed, or if
    the rollout was cancelled."""
    answer: str = ""
    segments: tuple[Segment, ...] = ()
    tokens_missing: str | None = None
    """The reason why the backend sent no tokens, so that there are no segments; else None."""
    turns: int = 0
    """Number of turns. The final-answer call and the calls for summaries are not turns."""
    tool_calls: int = 0
    is_hardcoded: bool = False
    """True if the run wrote its answer without reading a file or computing."""


class RolloutClient:
    """Runs tasks through a proxy whose profile has `agent.capture_tokens`."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "none",
        score: Score = reward,
        sandbox: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Any] | None = None,
        placement: Placement = "files",
        concurrency: int = 16,
        retry_delays_s: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`base_url` is the proxy's URL and ends in `/v1`. Each request has the fields in
        `parameters`, such as `temperature`, and its `sandbox` object has the fields in `sandbox`.
        If `sandbox` sets `capture` to `messages`, rollouts have no segments. With the `placement`
        `prompt`, the documents of a task are in its prompt, not in files. A rollout with the
        outcome INFRA_ERROR is repeated, at most once for each delay in `retry_delays_s`."""
        self._base_url = base_url
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._common_fields = {**(parameters or {}), "model": model}
        self._sandbox = {"capture": "tokens", **(sandbox or {})}
        self._placement = placement
        self._score = score
        self._concurrency = concurrency
        self._retry_delays_s = retry_delays_s
        self._timeout_s = timeout_s

    async def pause(self, timeout_s: float = PAUSE_TIMEOUT_S, *, drain: bool = False) -> int:
        """Let the proxy start no new runs until `resume`, for at most `timeout_s` seconds. Return
        the number of runs in progress, which continue. With `drain`, wait until there are none.
        Needs the operator's key if the proxy has several keys. Raises HTTPError. Raises
        RolloutError if the proxy refuses the key, or if the pause ends while `drain` waits."""
        state = await self._send_pause_request("POST", "/pause", {"timeout_s": timeout_s})
        while drain and state["runs_at_work"]:
            await asyncio.sleep(DRAIN_INTERVAL_S)
            state = await self._send_pause_request("GET", "/pause", {})
            if not state["paused"]:
                raise RolloutError(
                    f"The pause ended while runs were still in progress ({state['runs_at_work']})."
                )
        runs_at_work: int = state["runs_at_work"]
        return runs_at_work

    async def resume(self, weight_version: str | None = None) -> None:
        """Let the proxy start runs again. `weight_version` is the version of the weights for the
        trajectories of later model calls; None keeps the version. Needs the same key as `pause`.
        Raises RolloutError, HTTPError."""
        params = {} if weight_version is None else {"weight_version": weight_version}
        await self._send_pause_request("POST", "/resume", params)

    async def _send_pause_request(
        self, method: str, path: str, params: Mapping[str, float | str]
    ) -> dict[str, Any]:
        """Send a request to start, read or end the pause, and return the state of the pause. Raises
        HTTPError, RolloutError."""
        async with httpx.AsyncClient(
            base_url=self._base_url, headers=self._headers, timeout=REQUEST_TIMEOUT_S
        ) as http:
            answered = await http.request(method, path, params=params)
        _raise_for_status(answered)
        state: dict[str, Any] = answered.json()
        return state

    async def run(self, rows: Sequence[TaskRow], group_id: str | None = None) -> list[Rollout]:
        """Return a rollout of each row, in the order of the rows. Rollouts of the same row are a
        group; with `group_id`, all rollouts are one group with this id. The first RolloutError
        cancels the other rollouts and is raised."""
        step = uuid.uuid4().hex
        slots = asyncio.Semaphore(self._concurrency)
        async with self.connect(self._concurrency) as http:

            async def one(row: TaskRow) -> Rollout:
                async with slots:
                    return await self._run_task(http, row, group_id or f"{step}-{row.id}")

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(row)) for row in rows]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def connect(self, max_connections: int | None) -> httpx.AsyncClient:
        """Return an HTTP client for `run_once`, which the caller closes. With `max_connections`,
        further runs wait for a connection, at most REQUEST_TIMEOUT_S."""
        return httpx.AsyncClient(
            base_url=self._base_url,
            headers=self._headers,
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, read=self._timeout_s),
            limits=httpx.Limits(max_connections=max_connections),
        )

    async def _run_task(self, http: httpx.AsyncClient, row: TaskRow, group_id: str) -> Rollout:
        rollout = Rollout(row.id, group_id, INFRA_ERROR, None)
        for delay_s in (0.0, *self._retry_delays_s):
            await asyncio.sleep(delay_s)
            rollout = await self.run_once(http, row, group_id)
            if rollout.tokens_missing:
                raise RolloutError(f"A run has no tokens to train on: {rollout.tokens_missing}")
            if rollout.outcome != INFRA_ERROR:
                break
        return rollout

    async def run_once(
        self,
        http: httpx.AsyncClient,
        row: TaskRow,
        group_id: str,
        sandbox: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Run a task once, and append the reward to its trajectory. `sandbox` has further fields of
        the request's `sandbox` object. A failed request gives a rollout with the outcome
        INFRA_ERROR. Raises RolloutError."""
        try:
            return await self._attempt_rollout(http, row, self._request(row, group_id, sandbox))
        except TaskError as error:
            raise RolloutError(str(error)) from error
        except (httpx.HTTPError, KeyError, ValueError) as error:
            log.warning("%s: a rollout failed: %s", row.id, error)
            return Rollout(row.id, group_id, INFRA_ERROR, None)

    async def _attempt_rollout(
        self, http: httpx.AsyncClient, row: TaskRow, request: Mapping[str, Any]
    ) -> Rollout:
        """Send a request for a run, and append the reward to its trajectory. Raises HTTPError,
        RolloutError."""
        answered = await self._send_request(http, request)
        _raise_for_status(answered)
        completion, run_id = answered.json(), answered.headers["x-sandbox-run"]
        found = await http.get(f"/runs/{run_id}/trajectory")
        _raise_for_status(found)
        trajectory = found.json()
        answer = completion["choices"][0]["message"].get("content") or ""
        attempt = Attempt(
            id=row.id,
            answer=answer,
            submitted=trajectory["outcome"] == "submitted",
            sandbox_lost=trajectory["outcome"] == INFRA_ERROR,
            commands=_commands(trajectory),
        )
        scored = await asyncio.to_thread(self._score, row, attempt)
        reason = f"{scored.reason}; hardcoded" if scored.is_hardcoded else scored.reason
        given = {"value": scored.value, "source": "sandbox-train", "reason": reason}
        _raise_for_status(await http.post(f"/trajectories/{run_id}/reward", json=given))
        return Rollout(
            task_id=row.id,
            group_id=request["metadata"]["group_id"],
            outcome=trajectory["outcome"],
            reward=scored.value,
            trajectory_id=run_id,
            answer=answer,
            segments=tuple(Segment(**each) for each in trajectory["token_segments"]),
            tokens_missing=_missing_tokens_reason(trajectory),
            turns=len(trajectory["turns"]),
            tool_calls=len(trajectory["tool_calls"]),
            is_hardcoded=scored.is_hardcoded,
        )

    async def _send_request(
        self, http: httpx.AsyncClient, request: Mapping[str, Any]
    ) -> httpx.Response:
        """Send a request. During a pause of the proxy, send it again after each `Retry-After`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            answered = await http.post("/chat/completions", json=request)
            is_paused = answered.status_code == 503 and PAUSED_CODE in answered.text
            if not is_paused or time.monotonic() > deadline:
                return answered
            delay_s = float(answered.headers["retry-after"])
            await asyncio.sleep(min(delay_s, MAX_PAUSE_DELAY_S))

    def _request(
        self, row: TaskRow, group_id: str, sandbox: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"type": "file", "file": {"filename": name, "file_data": _data_url(text)}}
            for name, text in (row.files.items() if self._placement == "files" else ())
        ]
        content.append({"type": "text", "text": prompt_of(row, self._placement)})
        return {
            **self._common_fields,
            "messages": [{"role": "user", "content": content}],
            "metadata": {"group_id": group_id, "task_id": row.id},
            "sandbox": {"on_disconnect": "cancel", **self._sandbox, **(sandbox or {})},
        }


def _commands(trajectory: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the commands and the written programs of a trajectory."""
    arguments = (call["arguments"] for call in trajectory["tool_calls"])
    texts = (each.get("command") or each.get("file_text") for each in arguments)
    return tuple(text for text in texts if isinstance(text, str))


def _data_url(text: str) -> str:
    return f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"


def _missing_tokens_reason(trajectory: Mapping[str, Any]) -> str | None:
    """Return the reason why a run has no token segments. Return None if the run has token segments,
    if its outcome is INFRA_ERROR, or if no model call states a reason."""
    if trajectory["token_segments"] or trajectory["outcome"] == INFRA_ERROR:
        return None
    reasons = (call.get("tokens_missing") for call in trajectory["model_calls"])
    return next(filter(None, reasons), None)


def _raise_for_status(response: httpx.Response) -> None:
    """Raise RolloutError for a mistake in the request, and HTTPStatusError for other errors. The
    message is the server's."""
    if response.is_success:
        return
    message = f"{response.status_code}: {response.text[:500]}"
    is_refusal = response.status_code == 400 and '"sandbox.' in response.text
    if response.status_code in PERMANENT_STATUSES or is_refusal:
        raise RolloutError(message)
    raise httpx.HTTPStatusError(message, request=response.request, response=response)
