"""The conversation of a run with its model: the history, the model calls that extend it, and the
usage that the backend reports."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from policies.context import ContextSizes
from policies.default_instruction import join_instructions
from policies.limits import StopReason
from policies.prompts import final_answer_request, tool_call_request
from policies.reply_checks import is_quoted
from policies.steps import UsageScope
from proxy.agent.context import ContextFitter, ObservationFiles, TokenCounter
from proxy.agent.context_windows import ContextWindow
from proxy.agent.events import ModelCallFailed, ModelDelta, OnDelta
from proxy.agent.history import History
from proxy.agent.metered_model import MeteredModel
from proxy.agent.model import Completion, Message, StopRetryingError
from proxy.agent.result import Compaction, Stopwatch, add_usage, usage_count
from proxy.agent.suspension import INSTRUCTION_ROLES, leading_instructions, resumed_history
from proxy.agent.task import AgentTask, Params
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

MIN_LIMIT_DIVISOR = 4
"""The profile's `limits.min_turn_tokens` counts only up to 1/4 of the context window."""
LOGPROBS_PARAMS = ("logprobs", "top_logprobs")
"""Parameters of the visible answer that are also sent with each turn, because the prose of a turn
may be the answer."""
_INVALID_REQUEST_STATUSES = (400, 422)
"""Statuses with which backends refuse a prompt that contains a malformed tool call."""


@dataclass(slots=True)
class TrajectoryTokens:
    """Token counts of a run's conversation. Each token counts once, however often it was sent."""

    llm_calls: int = 0
    tokens: int = 0
    env_tokens: int = 0
    """Tokens of tool output."""
    context_tokens: int = 0
    """Tokens of the last prompt."""
    known_tokens: int = 0
    """Tokens of the last prompt and of the reply to it."""


class Conversation:
    """The history of one run, and the model calls that extend it."""

    def __init__(
        self,
        model: MeteredModel,
        task: AgentTask,
        messages: Sequence[Message],
        params: Params,
        tools: Sequence[Mapping[str, Any]],
        system_prompt: str,
        window: ContextWindow,
        files: ObservationFiles,
    ) -> None:
        """`messages` and `params` are those of the task, adapted by the run's style.
        `system_prompt` is the proxy's."""
        self._model = model
        self._task, self._request, self._params = task, task.request, params
        self._client_message_count = len(messages)
        self._tools = [*tools, *task.request.client_tools]
        self.history = _initial_history(task, messages, system_prompt)
        self._index_offset = len(self.history.entries) - len(messages)
        """Number of the proxy's messages before the client's. It has no meaning in a resumed
        run."""
        self.usage: dict[str, Any] = {}
        self.usages: list[Mapping[str, Any]] = []
        """The usage of each model call, in order."""
        self.trajectory = TrajectoryTokens()
        self.model_time = Stopwatch()
        """Time spent waiting for the model, without the time spent on handling its deltas."""
        self._repaired_replies: dict[int, Message] = {}
        """The repaired form of each reply that is in the history as the backend sent it, by message
        index."""
        self._counted_stub_compactions = 0
        """Number of stub compactions that the token counts of the trajectory take into account."""
        self._has_requested_final_call = False
        """True once the call that ends the run was requested."""
        self._optional_params = params.optional
        self._min_token_limit: int | None = (
            None if task.captures_tokens else task.profile.limits.min_turn_tokens
        )
        """Minimum token limit of a call; None without a minimum, or once the backend refused
        it."""
        self._turn_params = {k: v for k, v in params.final.items() if k in LOGPROBS_PARAMS}
        self.has_used_tools = False
        """True once a tool has run. The loop also sets it in resumed runs and in the reference
        style. Before that, the history is never compacted."""
        self._counter = TokenCounter(self._tools)
        self._context = ContextFitter(
            window,
            self.history,
            self._counter,
            files,
            self._make_extra_call,
            compacts=task.profile.limits.compact and not task.captures_tokens,
        )

    @property
    def compactions(self) -> Sequence[Compaction]:
        """The compactions of the history, in order."""
        return self._context.compactions

    def state(self) -> dict[str, Any]:
        """Return the usage and the token counts so far, as JSON values."""
        return {
            "usage": self.usage,
            "usages": self.usages,
            "trajectory": asdict(self.trajectory),
            "has_used_tools": self.has_used_tools,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the usage and the token counts of the run on its previous server. `state` is the
        value that the method `state` returned there."""
        self.usage, self.usages = dict(state["usage"]), list(state["usages"])
        self.trajectory = TrajectoryTokens(**state["trajectory"])
        self.has_used_tools = state["has_used_tools"]

    def trajectory_tokens(self) -> int:
        """Return the tokens of the trajectory, with an estimate of the messages that were not sent
        yet. Return 0 if the profile does not limit trajectory tokens."""
        if self._task.profile.limits.max_trajectory_tokens is None:
            return 0
        prompt = self._counter.tokens(self.history.messages)
        return self.trajectory.tokens + max(0, prompt - self.trajectory.known_tokens)

    def usage_of(self, scope: UsageScope) -> Mapping[str, Any]:
        """Return the usage to report to the client: of the last call, or of all calls."""
        return self.usages[-1] if scope == "last_call" and self.usages else self.usage

    @property
    def partial_completion(self) -> Completion | None:
        """The reply to the last call as far as it arrived, if an error or a cancellation cut it
        off; else None."""
        return self._model.partial_completion

    def append_reply(self, reply: Completion, repaired: Message) -> None:
        """Append a reply to the history. `repaired` is the reply's message with its tool calls
        repaired, and is what most runs append. A run that captures tokens appends the message as
        the backend sent it, so that the next prompt begins with the same tokens; `repaired`
        replaces the message only if the backend refuses the next prompt."""
        if not self._task.captures_tokens:
            self.history.append(repaired)
            return
        if reply.message != repaired:
            self._repaired_replies[len(self.history.entries)] = repaired
        self.history.append(reply.message)

    def repair_replies(self) -> None:
        """Replace each reply in the history that has malformed tool calls by its repaired form."""
        self.history.replace_messages(self._repaired_replies)
        self._repaired_replies = {}

    async def complete_turn(self, on_delta: OnDelta) -> Completion:
        """Request the model's next turn, with tools. Raises BackendError."""
        fields: dict[str, Any] = {"tools": self._tools, **self._turn_params}
        if self._request.must_call:
            fields["tool_choice"] = "required"
        elif self._request.tool_choice is not None and self.trajectory.llm_calls == 0:
            # Only for the first turn: a forced call in every turn would never let the run end.
            fields["tool_choice"] = self._request.tool_choice
        if self._request.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = self._request.parallel_tool_calls
        try:
            return await self._complete(fields, on_delta)
        except BackendError as error:
            if not self._turn_params or error.status != 400 or self.trajectory.llm_calls:
                raise
            if isinstance(error, ContextOverflowError | ToolsRefusedError):
                raise
            # llama.cpp refuses log probabilities together with tools in a stream.
            for name in self._turn_params:
                del fields[name]
            self._turn_params = {}
            return await self._complete(fields, on_delta)

    async def complete_plain_turn(self, on_delta: OnDelta | None) -> Completion:
        """Send the client's own request, without the proxy's prompt and tools. Raises BackendError.

        The completion tokens that the run has used are subtracted from each of the client's token
        limits, but at least half of the limit is left, because an answer of a few tokens would be
        of no use.
        """
        spent = usage_count(self.usage, "completion_tokens")
        body: dict[str, Any] = {
            "model": self._task.model,
            "messages": self._request.messages,
            **self._params.base,
            **self._params.final,
            **{
                name: max(limit - spent, (limit + 1) // 2)
                for name, limit in self._params.token_limits.items()
            },
        }
        if self._request.client_tools:
            body["tools"] = self._request.client_tools
            if self._request.tool_choice is not None:
                body["tool_choice"] = self._request.tool_choice
        on_delta = on_delta and self.model_time.pause_during(on_delta)
        reply = await self._call_model(body, on_delta, index_offset=0)
        self._count_reply(reply)
        return reply

    async def complete_required_call(
        self, stop: StopReason, on_delta: OnDelta | None
    ) -> Completion:
        """Request a call of one of the client's tools, without offering the proxy's tools. Raises
        BackendError."""
        self._has_requested_final_call = True
        self.history.append_request(tool_call_request(stop))
        tools: dict[str, Any] = {"tools": self._request.client_tools, "tool_choice": "required"}
        return await self._complete(tools, on_delta)

    async def complete_final_answer(self, stop: StopReason, on_delta: OnDelta | None) -> Completion:
        """Request the visible answer, without tools and in the form that the client wants. Raises
        BackendError."""
        self._has_requested_final_call = True
        self.history.append_request(final_answer_request(stop, self._request.answer_form))
        return await self._complete(self._params.final, on_delta)

    async def retry_final_answer(
        self, answer: str, request: str, on_delta: OnDelta | None
    ) -> Completion:
        """Request the visible answer again after `answer`, which violates the form. `request` is
        the message that explains the violation. Raises BackendError."""
        self.history.append({"role": "assistant", "content": answer})
        self.history.append_request(request)
        return await self._complete(self._params.final, on_delta)

    async def _complete(
        self, extra_fields: Mapping[str, Any], on_delta: OnDelta | None
    ) -> Completion:
        """Make a model call with the history as its prompt. If the backend refuses the call as too
        long, retry: first without the optional parameters, then without raising the client's token
        limit, then with a compacted history or a lower token limit. Raises BackendError."""
        on_delta = on_delta and self.model_time.pause_during(on_delta)
        extra_fields = {**extra_fields, **self._token_limits()}
        extra_fields = await self._context.fit(extra_fields, may_compact=self.has_used_tools)
        while True:
            try:
                reply = await self._call_with_history(extra_fields, on_delta)
            except ContextOverflowError as error:
                await self._report_retry(error, on_delta)
                if self._optional_params:
                    self._optional_params = {}
                elif self._is_token_limit_raised():
                    self._min_token_limit = None
                    extra_fields = await self._context.lower_token_limit_after_overflow(
                        {**extra_fields, **self._token_limits()}, error
                    )
                else:
                    extra_fields = await self._context.fit_after_overflow(
                        extra_fields, error, may_compact=self.has_used_tools
                    )
            else:
                self._count_reply(reply)
                self._context.record_usage(self.history.messages, reply)
                return reply

    async def _call_with_history(
        self, extra_fields: Mapping[str, Any], on_delta: OnDelta | None
    ) -> Completion:
        """Make a model call with the history as its prompt. If the backend refuses a history with
        malformed tool calls, repair them and retry. Raises BackendError."""
        try:
            return await self._call_model(self._body(self.history.messages, extra_fields), on_delta)
        except (ContextOverflowError, ToolsRefusedError):
            raise
        except BackendError as error:
            if error.status not in _INVALID_REQUEST_STATUSES or not self._repaired_replies:
                raise
        self.repair_replies()
        return await self._call_model(self._body(self.history.messages, extra_fields), on_delta)

    async def _report_retry(self, error: BackendError, on_delta: OnDelta | None) -> None:
        """If a part of the reply had arrived before the error, report to `on_delta` that the call
        failed and is retried. Raises the error if the client has already seen a part of the
        reply."""
        if on_delta is None or self._model.partial_completion is None:
            return
        try:
            await on_delta(ModelCallFailed(error.status, 0.0))
        except StopRetryingError:
            raise error from None

    def _is_token_limit_raised(self) -> bool:
        """Return True if the token limit of a call is raised above the client's."""
        return (
            self._min_token_limit is not None and self._token_limits() != self._params.token_limits
        )

    def _token_limits(self) -> dict[str, Any]:
        """Return the client's token limits by parameter name (such as `max_tokens`), each raised to
        the minimum that reasoning and tool-call arguments need; empty if the client set none."""
        if not self._params.token_limits:
            return {}
        minimum = self._min_token_limit or 0
        if (window := self._context.known_window) is not None:
            minimum = min(minimum, window // MIN_LIMIT_DIVISOR)
        return {name: max(limit, minimum) for name, limit in self._params.token_limits.items()}

    async def _make_extra_call(self, messages: Sequence[Message]) -> Completion | None:
        """Make a model call without tools whose messages do not enter the history. Return None if
        the budget does not allow the call. While the run requests its final answer, the budget is
        not checked."""
        if not self._has_requested_final_call and not await self._model.reserve_extra_call(
            messages
        ):
            return None
        reply = await self._call_model(self._body(messages, self._token_limits()), ignore_delta)
        self._count_reply(reply)
        return reply

    async def _call_model(
        self, body: Mapping[str, Any], on_delta: OnDelta | None, index_offset: int | None = None
    ) -> Completion:
        """Make a model call. The message indexes in a backend's error are converted to those of the
        client's request. `index_offset` is the number of messages that the proxy has put before the
        client's in `body`, by default as many as in the run's history."""
        if body.get("prompt_logprobs") is not None:
            on_delta = None  # no engine returns prompt_logprobs in a stream
        try:
            with self.model_time:
                return await self._model.complete(body, on_delta)
        except (BackendError, asyncio.CancelledError) as error:
            if partial_completion := self._model.partial_completion:
                self._count_reply(partial_completion)
            if isinstance(error, ContextOverflowError) and is_quoted(error.sizes.excerpt, body):
                error.sizes = ContextSizes()
            if isinstance(error, BackendError):
                offset = self._index_offset if index_offset is None else index_offset
                error.renumber_messages(partial(self._client_message_index, offset))
            raise

    def _client_message_index(self, offset: int, index: int) -> int | None:
        """Return the index that a message of a model call has in the client's request. Return None
        if the message is not the client's, or if its index is unknown, as in a translated request
        or a resumed run."""
        task = self._task
        is_resumed = task.session.suspended_run is not None or task.checkpoint is not None
        is_new = self._request.has_client_indexes and not is_resumed
        index -= offset
        return index if is_new and 0 <= index < self._client_message_count else None

    def _body(self, messages: Sequence[Message], extra_fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._task.model,
            "messages": messages,
            **self._optional_params,
            **self._params.base,
            **extra_fields,
        }

    def _count_reply(self, reply: Completion) -> None:
        self.usage = add_usage(self.usage, reply.usage)
        self.usages.append(reply.usage)
        prompt = usage_count(reply.usage, "prompt_tokens")
        completion = usage_count(reply.usage, "completion_tokens")
        trajectory = self.trajectory
        new = self._new_prompt_tokens(prompt) if trajectory.known_tokens else 0
        trajectory.tokens += completion + (new if trajectory.llm_calls else prompt)
        trajectory.env_tokens += self._tool_output_tokens(new)
        trajectory.context_tokens = prompt
        trajectory.known_tokens = prompt + completion
        trajectory.llm_calls += 1

    def _new_prompt_tokens(self, prompt: int) -> int:
        """Return how many tokens of a prompt were added after the model's last reply."""
        stubs = sum(compaction.kind == "stubs" for compaction in self.compactions)
        if stubs == self._counted_stub_compactions:
            return max(0, prompt - self.trajectory.known_tokens)
        # The prompt shrank by the stubs, so its growth is estimated from the new messages instead.
        self._counted_stub_compactions = stubs
        turns = self.history.turns()
        return (
            self._counter.estimate_tokens([entry.message for entry in turns[-1][1:]])
            if turns
            else 0
        )

    def _tool_output_tokens(self, new_tokens: int) -> int:
        """Return how many of the `new_tokens` after the model's last reply are tool output."""
        new = turns[-1][1:] if new_tokens and (turns := self.history.turns()) else []
        requests = [entry.message for entry in new if entry.kind == "asked"]
        if len(requests) == len(new):
            return 0
        return (
            max(0, new_tokens - self._counter.estimate_tokens(requests)) if requests else new_tokens
        )


async def ignore_delta(delta: ModelDelta) -> None:
    """Do nothing: the caller reads the complete reply."""


def _initial_history(task: AgentTask, messages: Sequence[Message], system_prompt: str) -> History:
    """Return the initial history of a new run, or the history of a resumed run."""
    if task.checkpoint:
        return task.checkpoint.history()
    if not any(message.get("role") in INSTRUCTION_ROLES for message in messages) and system_prompt:
        # The template adds its default instruction only to requests without a system message.
        system_prompt = join_instructions(task.default_instruction, system_prompt)
    if task.session.suspended_run is None:
        return History(with_system_prompt(messages, system_prompt))
    if instructions := leading_instructions(messages):
        instructions = with_system_prompt(instructions, system_prompt)
    return resumed_history(task.session.suspended_run, messages, instructions)


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """Return the client's messages with `system_prompt` before the client's own system prompt. Both
    are in one system message at the beginning, because many chat templates accept no other system
    message."""
    if not system_prompt:
        return list(messages)
    first = messages[0] if messages else {}
    if first.get("role") not in INSTRUCTION_ROLES:
        return [{"role": "system", "content": system_prompt}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        merged: Any = [{"type": "text", "text": system_prompt}, *content]
    else:
        merged = f"{system_prompt}\n\n{content}" if content else system_prompt
    return [{**first, "content": merged}, *messages[1:]]
