"""Decides which models get tools, and so a sandbox. Also finds the default instruction of a model's
chat template.

Verdicts come from the settings, from probes in the background, from refusals of the backend and
from runs. Open it when a model wrongly gets a sandbox, or wrongly gets none.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from policies.default_instruction import KnownInstruction, find_default_instruction
from policies.reply_checks import is_quoted
from policies.tool_support import (
    FAILED_TOOLS_VERDICT_TTL_S,
    SUPPORTED,
    VERSION_CHECK_INTERVAL_S,
    KnownVerdict,
    ToolSupport,
    ToolVerdict,
    disabled_verdict,
    shows_no_tool_support,
    tools_failed_verdict,
    tools_ignored_verdict,
    tools_refused_verdict,
)
from proxy.agent.events import OnDelta
from proxy.agent.model import Completion, Message, Model, ModelWrapper, Upstream, UpstreamRequest
from proxy.agent.result import Result, usage_count
from proxy.errors import BackendError, ToolsRefusedError, no_tools_error
from proxy.metrics import Metrics
from proxy.models.backend_errors import parse_json
from proxy.models.relay import read_if_at_most
from proxy.store.tool_verdicts import ToolVerdictRepository

log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
PROBE_TIMEOUT_S = 120.0
"""Timeout of a probe for tool support, in seconds. It is long because a busy engine answers
late."""
INSTRUCTION_TIMEOUT_S = 30.0
"""Timeout of a probe for the default instruction, in seconds. The model generates no tokens."""
REPROBE_AFTER_S = 60.0
"""Seconds until the next probe after a probe has failed, or after a refusal that contradicts a
verdict."""
MAX_PROBES = 4
"""Maximum number of concurrent probes. A probe beyond the limit starts with a later request."""
MAX_MODELS = 1024
"""Maximum number of models in each table of `ToolVerdicts`, because clients can invent names of
models."""
_TOKENIZE = "/tokenize"
_APPLY_TEMPLATE = "/apply-template"
_DETOKENIZE = "/detokenize"
_REFUSED_STATUSES = (400, 403, 404, 405, 422, 501)
"""Statuses of a server that lacks an endpoint, or whose endpoint of that name does something else.
Any other status except 200 may be temporary."""
MAX_PROMPT_TOKENS = 16_384
"""Maximum number of tokens of a rendered prompt. A longer prompt is ignored."""
MAX_RESPONSE_BYTES = 4 << 20
"""Maximum size of a response to a probe. llama.cpp's properties contain the chat template."""
MAX_VERSION_CHARS = 200
MAX_TOKENS = 1
"""Maximum number of tokens of one completion of a probe. A probe requests at most two
completions."""
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Tells the present time of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

_VERSION_ENDPOINTS: Sequence[tuple[str, Sequence[str]]] = (
    ("/version", ("version",)),  # vLLM
    ("/props", ("build_info", "chat_template", "model_path")),  # llama.cpp
    ("/get_server_info", ("version", "tool_call_parser", "chat_template")),  # SGLang
    ("/api/version", ("version",)),  # Ollama
)
"""Endpoints that report the engine, with the fields that make up its version. A response without
the first field is ignored."""


@dataclass(frozen=True, slots=True)
class ToolSupportSettings:
    """The setting `backend.tool_support` and its overrides by model."""

    default: ToolSupport = "always"
    model_overrides: Sequence[tuple[str, ToolSupport]] = ()
    """Names of models, or patterns with `*`, and their settings. The first match counts."""

    def for_model(self, model: str) -> ToolSupport:
        """Return the setting for a model."""
        matching = (
            setting for pattern, setting in self.model_overrides if fnmatchcase(model, pattern)
        )
        return next(matching, self.default)


class ToolProbe:
    """Tests whether a model's chat template contains the tools of a request, which costs at most
    two generated tokens, and finds the template's default instruction, which costs none.

    `is_local` is True if the operator runs the server. The server's prompts and their token counts
    are then trusted even if the server does not report its engine.
    """

    def __init__(self, model: Model, *, is_local: bool = True) -> None:
        self._model = model
        self._is_local = is_local

    async def models(self) -> list[str]:
        """Return the names of the backend's models. Raises BackendError."""
        return [str(model.get("id")) for model in await self._model.models()]

    async def engine_version(self) -> str | None:
        """Return a text that identifies the engine, for comparison with an earlier one: the
        endpoint that reports the engine, and the reported fields that affect tools, such as the
        version and the chat template. Return None if no endpoint reports the engine. Raises
        BackendError."""
        upstream = self._model.upstream
        if upstream is None:
            return None
        for path, fields in _VERSION_ENDPOINTS:
            report = await _fetch_json(upstream, "GET", path)
            if isinstance(report, dict) and isinstance(report.get(fields[0]), str):
                version = " ".join(_abbreviate(report.get(field)) for field in fields)
                return f"{path} {version}"[:MAX_VERSION_CHARS]
        return None

    async def verdict(self, model_name: str, version: str | None) -> ToolVerdict | None:
        """Return the verdict on a model, or None if the probe is inconclusive. Raises
        BackendError."""
        upstream = self._model.upstream
        if upstream is None or (version is None and not self._is_local):
            return None
        messages = _random_prompt()
        has_tools = await _template_contains_tools(upstream, model_name, messages)
        try:
            with_tools = await self._prompt_tokens(model_name, messages, [_PROBE_TOOL])
        except ToolsRefusedError as error:
            return tools_refused_verdict(model_name, error.message)
        if has_tools:
            return SUPPORTED
        without = await self._prompt_tokens(model_name, messages, [])
        if not with_tools or not without:
            return None
        return SUPPORTED if with_tools > without else tools_ignored_verdict(model_name)

    async def verdict_if_refused(self, model_name: str) -> ToolVerdict | None:
        """Return the verdict against a model if the backend refuses a request with a harmless tool,
        else None. Raises BackendError."""
        try:
            await self._prompt_tokens(model_name, _random_prompt(), [_PROBE_TOOL])
        except ToolsRefusedError as error:
            return tools_refused_verdict(model_name, error.message)
        return None

    async def default_instruction(self, model_name: str, version: str | None) -> str | None:
        """Return the default instruction of the model's chat template. Return "" if there is none
        or if the server does not render prompts. Return None if no server is asked: the model has
        no server, or a public server does not report its engine. Raises BackendError for a failure
        that may be temporary.

        An instruction that differs between two renderings, such as the time in seconds, is
        ignored.
        """
        upstream = self._model.upstream
        if upstream is None or (version is None and not self._is_local):
            return None
        failure: BackendError | None = None
        for render in (_rendered_prompt, _detokenized_prompt):
            try:
                default = await _rendered_default_instruction(partial(render, upstream, model_name))
            except BackendError as error:
                failure = error
            else:
                if default is not None:
                    return default
        if failure is not None:
            raise failure
        return ""

    async def _prompt_tokens(
        self,
        model_name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> int:
        body = {"model": model_name, "messages": messages, "max_tokens": MAX_TOKENS}
        if tools:
            body["tools"] = tools
        completion = await self._model.complete(body, None)
        return usage_count(completion.usage, "prompt_tokens")


def _random_prompt() -> list[dict[str, Any]]:
    """Return a prompt of one message with random text. Servers may report too few tokens for a
    prompt in their prefix cache."""
    return [{"role": "user", "content": f"Hi {secrets.token_hex(3)}"}]


def _abbreviate(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else sha256(text.encode(errors="replace")).hexdigest()[:16]


async def _template_contains_tools(
    upstream: Upstream, model_name: str, messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Return True if a tool makes the prompt longer, according to the server's endpoint that
    tokenizes or renders prompts. False proves nothing: in older vLLMs, this endpoint ignores
    tools."""
    for path in (_TOKENIZE, _APPLY_TEMPLATE):
        body: dict[str, Any] = {"model": model_name, "messages": messages}
        without = _prompt_size(await _fetch_json(upstream, "POST", path, body))
        if without:
            body["tools"] = [_PROBE_TOOL]
            return _prompt_size(await _fetch_json(upstream, "POST", path, body)) > without
    return False


def _prompt_size(response: Any) -> int:
    """Return the size of the prompt, or 0 if it is unknown. vLLM sends a number of tokens,
    llama.cpp the rendered text, whose characters are counted."""
    if not isinstance(response, dict):
        return 0
    count, prompt = response.get("count"), response.get("prompt")
    if isinstance(count, int):
        return count
    return len(prompt) if isinstance(prompt, str) else 0


async def _rendered_default_instruction(
    render: Callable[[list[Message]], Awaitable[str]],
) -> str | None:
    """Return the default instruction in the prompts that `render` returns, "" if there is none, or
    None if `render` returns no prompt. Raises BackendError for a failure that may be temporary."""
    user, system = _random_prompt()[0], f"Be {secrets.token_hex(8)}"
    without = await render([user])
    if not without:
        return None
    try:
        with_system = await render([{"role": "system", "content": system}, user])
    except BackendError as error:
        if error.status != 500:
            raise
        return ""  # the template raises an error for the role `system`
    default = find_default_instruction(
        without_system=without, with_system=with_system, system=system, user=user["content"]
    )
    if not default:
        return ""
    again = await render([user])
    return default if again == without else ""


async def _rendered_prompt(
    upstream: Upstream, model_name: str, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the prompt that llama.cpp makes of the messages, or "" if the server refuses to render
    it. Raises BackendError for a failure that may be temporary."""
    body = {"model": model_name, "messages": messages}
    return _prompt_text(await _fetch_rendering(upstream, _APPLY_TEMPLATE, body))


async def _detokenized_prompt(
    upstream: Upstream, model_name: str, messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the prompt that vLLM makes of the messages, which is the text of its tokens, or "" if
    the server refuses to render it. Raises BackendError for a failure that may be temporary."""
    body = {"model": model_name, "messages": messages}
    tokenized = await _fetch_rendering(upstream, _TOKENIZE, body)
    tokens = tokenized.get("tokens") if isinstance(tokenized, dict) else None
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_PROMPT_TOKENS:
        return ""
    if not all(isinstance(token, int) for token in tokens):
        return ""
    body = {"model": model_name, "tokens": tokens}
    return _prompt_text(await _fetch_rendering(upstream, _DETOKENIZE, body))


def _prompt_text(response: Any) -> str:
    prompt = response.get("prompt") if isinstance(response, dict) else None
    return prompt if isinstance(prompt, str) else ""


async def _fetch_rendering(upstream: Upstream, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON response to a POST request, or None if the server refuses the request. Raises
    BackendError for a failure that may be temporary."""
    status, response = await _fetch(upstream, "POST", path, body)
    if status != 200 and status not in _REFUSED_STATUSES:
        raise BackendError(f"{path} failed with status {status}", status=status)
    return response


async def _fetch_json(
    upstream: Upstream, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """Return the JSON at a path of the server, or None if the status is not 200, or if the body is
    too long or not JSON. Raises BackendError if there is no response."""
    _, content = await _fetch(upstream, method, path, body)
    return content


async def _fetch(
    upstream: Upstream, method: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, Any]:
    """Return the status of a response, and its JSON as `_fetch_json` does."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"accept": "application/json"}
    if data is not None:
        headers["content-type"] = "application/json"
    response = await upstream.send(UpstreamRequest(method, path, headers, data))
    if response.status != 200:
        await response.body.aclose()
        return response.status, None
    content = await read_if_at_most(response.body, MAX_RESPONSE_BYTES)
    try:
        return 200, None if content is None else parse_json(content)
    except BackendError:
        return 200, None


class ToolVerdicts:
    """The verdicts on the models of one backend, and the default instructions of their chat
    templates.

    Without a probe, verdicts come only from the settings and from runs, and there are no default
    instructions. Without a repository, both are lost when the process ends.
    """

    def __init__(
        self,
        settings: ToolSupportSettings = ToolSupportSettings(),
        probe: ToolProbe | None = None,
        repository: ToolVerdictRepository | None = None,
        backend: str = "",
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._probe = probe
        self._repository = repository
        self._backend = backend
        self._now = now
        self._known_verdicts: dict[str, KnownVerdict] = {}
        self._default_instructions: dict[str, KnownInstruction] = {}
        """The default instruction of each model whose chat template has one."""
        self._next_probe_at: dict[str, float] = {}
        """The earliest time of the next probe of a model."""
        self._doubted_models: set[str] = set()
        """Models that support tools according to a probe, although the backend has refused tools
        since then."""
        self._owner_verdicts: dict[tuple[str, str], tuple[float, ToolVerdict]] = {}
        """The expiry time and the verdict from the owner's runs, by owner and model."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> None:
        """Load the stored verdicts and default instructions."""
        if self._repository is None:
            return
        self._default_instructions = await self._repository.default_instructions(self._backend)
        self._known_verdicts = await self._repository.all(self._backend)
        for model, known in self._known_verdicts.items():
            if self._settings.for_model(model) == "probe":
                _warn_if_unsupported(known.verdict)

    def verdict_for(self, owner: str, model: str) -> ToolVerdict:
        """Return the verdict on a model for a request of this owner, without waiting. A model
        without a verdict gets tools. If a probe is due, it starts in the background."""
        setting = self._settings.for_model(model)
        if setting != "probe":
            return SUPPORTED if setting == "always" else disabled_verdict(model)
        self._probe_if_due(model)
        known = self._known_verdicts.get(model)
        if known is not None and known.verdict.reason:
            return known.verdict
        until, verdict = self._owner_verdicts.get((owner, model), (0.0, SUPPORTED))
        return verdict if self._now() < until else SUPPORTED

    def default_instruction(self, model: str) -> str:
        """Return the default instruction of the model's chat template, without waiting. Return ""
        if there is none, if it is unknown or outdated, or if the model is not probed. If a probe is
        due, it starts in the background."""
        if self._probe is None or self._settings.for_model(model) == "never":
            return ""
        self._probe_if_due(model)
        known = self._default_instructions.get(model)
        return "" if known is None or known.is_outdated(self._now()) else known.text

    def note_refusal(self, model: str, message: str) -> ToolVerdict:
        """Note that the backend refused a request because of its tools, and return the verdict on
        this request.

        The message may quote the client's text. So the verdict holds for other requests only after
        the backend has refused a probe, too. If a probe has found that the model supports tools,
        that verdict stays until the next probe, after `REPROBE_AFTER_S`.
        """
        if self._settings.for_model(model) != "probe":
            return SUPPORTED
        known = self._known_verdicts.get(model)
        if known is None:
            if self._probe is not None:
                confirm = partial(self._confirm_refusal, self._probe, model)
                self._start_task(f"refusal {model}", confirm)
        elif known.verdict.reason is None and model not in self._doubted_models:
            self._doubted_models.add(model)
            _put_and_drop_oldest(self._next_probe_at, model, self._now() + REPROBE_AFTER_S)
        return tools_refused_verdict(model, message)

    def note_run(self, owner: str, result: Result) -> None:
        """Set a verdict against the model if its setting is `probe` and the run is evidence that
        the model cannot use tools; see `shows_no_tool_support`. The verdict holds only for the
        owner of the run, for `FAILED_TOOLS_VERDICT_TTL_S`."""
        if self._settings.for_model(model := result.model) != "probe":
            return
        runs = (result, *result.others)
        trouble = {word for run in runs for word in run.tool_trouble}
        # The run's number of commands includes calls of unknown tools, which use no memory and no
        # CPU time.
        ran = any(run.stats.peak_mem_bytes or run.stats.cpu_ms for run in runs)
        if not shows_no_tool_support(trouble, has_run_commands=ran):
            return
        verdict = tools_failed_verdict(model, trouble)
        log.warning(
            "run %s: requests with its key get no tools for now: %s", result.run_id, verdict.message
        )
        _put_and_drop_oldest(
            self._owner_verdicts,
            (owner, model),
            (self._now() + FAILED_TOOLS_VERDICT_TTL_S, verdict),
        )

    async def wait_idle(self) -> None:
        """Wait until no probe runs and all results are stored."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
            await asyncio.sleep(0)  # the callbacks remove the finished tasks

    async def aclose(self) -> None:
        """Cancel the running probes. Safe to call twice."""
        for task in self._tasks.values():
            task.cancel()
        await self.wait_idle()

    def _probe_if_due(self, model: str) -> None:
        if self._probe is None or self._now() < self._next_probe_at.get(model, 0.0):
            return
        if self._start_task(model, partial(self._probe_model, self._probe, model)):
            _put_and_drop_oldest(self._next_probe_at, model, self._now() + VERSION_CHECK_INTERVAL_S)

    def _start_task(self, task_name: str, work: Callable[[], Awaitable[None]]) -> bool:
        """Start a task, unless a task with that name or `MAX_PROBES` other tasks are running.
        Return True if the task was started."""
        if task_name in self._tasks or len(self._tasks) >= MAX_PROBES:
            return False

        async def run() -> None:
            try:
                await work()
            except Exception:
                log.exception("the result of a model's probe could not be stored")

        self._tasks[task_name] = asyncio.create_task(run())
        self._tasks[task_name].add_done_callback(lambda _: self._tasks.pop(task_name, None))
        return True

    async def _probe_model(self, probe: ToolProbe, model: str) -> None:
        """Find the verdict on a model, unless the settings determine it, and then the default
        instruction of its chat template."""
        known = self._known_verdicts.get(model)
        needs_verdict = self._settings.for_model(model) == "probe"
        is_listed, version, verdict = False, None, None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                is_listed = model in await probe.models()
                version = await probe.engine_version() if is_listed else None
                if is_listed and needs_verdict:
                    verdict = await self._new_verdict(probe, model, version)
            checked_version = version
        except (BackendError, TimeoutError) as error:
            self._note_failed_probe(model, error)
            checked_version = known.version if known else None
        now = self._now()
        if verdict is not None:
            self._doubted_models.discard(model)
            await self._store(model, KnownVerdict(verdict, version, now))
        elif needs_verdict and known is not None and known.is_outdated(checked_version, now):
            await self._forget(model)
        if is_listed:
            await self._probe_default_instruction(probe, model, version)

    async def _probe_default_instruction(
        self, probe: ToolProbe, model: str, version: str | None
    ) -> None:
        """Find the default instruction of a model's chat template anew, because it may contain the
        date. The known instruction stays if the probe fails."""
        try:
            async with asyncio.timeout(INSTRUCTION_TIMEOUT_S):
                text = await probe.default_instruction(model, version)
        except (BackendError, TimeoutError) as error:
            self._note_failed_probe(model, error)
            return
        # The table in memory changes last, so that the next probe repeats a change that could not
        # be stored.
        if text:
            known = KnownInstruction(text, self._now())
            if self._repository is not None:
                await self._repository.save_default_instruction(self._backend, model, known)
            _put_and_drop_oldest(self._default_instructions, model, known)
        elif text is not None and model in self._default_instructions:
            if self._repository is not None:
                await self._repository.delete_default_instruction(self._backend, model)
            self._default_instructions.pop(model, None)

    def _note_failed_probe(self, model: str, error: BackendError | TimeoutError) -> None:
        """Make the next probe of a model due after `REPROBE_AFTER_S`."""
        log.debug("the model %r could not be probed: %s", model, error)
        _put_and_drop_oldest(self._next_probe_at, model, self._now() + REPROBE_AFTER_S)

    async def _confirm_refusal(self, probe: ToolProbe, model: str) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                verdict = await probe.verdict_if_refused(model)
        except (BackendError, TimeoutError) as error:
            log.debug("the refusal of tools for %r could not be confirmed: %s", model, error)
            return
        if verdict is not None and model not in self._known_verdicts:
            self._next_probe_at.pop(model, None)
            await self._store(model, KnownVerdict(verdict, None, self._now()))

    async def _new_verdict(
        self, probe: ToolProbe, model: str, version: str | None
    ) -> ToolVerdict | None:
        """Return a new verdict, or None if the known verdict still holds.

        A verdict against tools is checked each time, because an operator who follows the verdict's
        advice restarts the engine in the same version.
        """
        known = self._known_verdicts.get(model)
        if known is None or known.verdict.reason or model in self._doubted_models:
            return await probe.verdict(model, version)
        outdated = known.is_outdated(version, self._now())
        return await probe.verdict(model, version) if outdated else None

    async def _store(self, model: str, known_verdict: KnownVerdict) -> None:
        before = self._known_verdicts.get(model)
        _put_and_drop_oldest(self._known_verdicts, model, known_verdict)
        if before is None or before.verdict != known_verdict.verdict:
            _warn_if_unsupported(known_verdict.verdict)
        if self._repository is not None:
            await self._repository.save(self._backend, model, known_verdict)

    async def _forget(self, model: str) -> None:
        self._known_verdicts.pop(model, None)
        if self._repository is not None:
            await self._repository.delete(self._backend, model)


def _warn_if_unsupported(verdict: ToolVerdict) -> None:
    if verdict.reason:
        log.warning("no tools, and so no sandbox: %s", verdict.message)


def _refusal_error(verdict: ToolVerdict, error: ToolsRefusedError) -> BackendError:
    """Return the error that the agent loop gets for a refusal of tools. With `tool_support: always`
    the error is not a ToolsRefusedError, so that the loop does not answer without tools."""
    if verdict.reason:
        return no_tools_error(verdict)
    return BackendError(
        error.message, status=error.status, type=error.type, code=error.code, param=error.param
    )


def _put_and_drop_oldest(table: dict[K, V], key: K, value: V) -> None:
    """Put a value into a table, and remove the oldest value beyond `MAX_MODELS`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_MODELS:
        table.pop(next(iter(table)))


class MonitoredModel(ModelWrapper):
    """Measures the durations of model calls, and notes the backend's refusals of tools. The error
    of a refusal has the text of the verdict if the model's setting is `probe`."""

    def __init__(self, model: Model, verdicts: ToolVerdicts, metrics: Metrics) -> None:
        super().__init__(model)
        self._verdicts = verdicts
        self._metrics = metrics

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        try:
            return await self._metrics.observe_model_call(self._model.complete, body, on_delta)
        except ToolsRefusedError as error:
            if is_quoted(error.words, body):
                raise  # a quotation of the client's own text proves nothing
            verdict = self._verdicts.note_refusal(str(body.get("model")), error.message)
            raise _refusal_error(verdict, error) from error
