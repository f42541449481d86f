"""Decides which models are given tools.

Verdicts come from the settings, from probes in the background, from refusals of the backend and
from runs. Open it when a model gets no sandbox although it should, or the other way round.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from policies.reply_checks import is_quoted
from policies.tool_support import (
    CHECK_EVERY_S,
    EVIDENCE_HOLDS_S,
    SUPPORTED,
    KnownVerdict,
    ToolSupport,
    ToolVerdict,
    failed,
    ignored,
    is_evidence,
    never,
    refused,
)
from proxy.agent.events import OnDelta
from proxy.agent.model import (
    Completion,
    Credentials,
    Model,
    UpstreamPaths,
    UpstreamRequest,
    UpstreamResponse,
)
from proxy.agent.result import Result, tokens
from proxy.errors import BackendError, ToolsRefusedError, no_tools_error
from proxy.metrics import Metrics
from proxy.models.backend_errors import parsed
from proxy.models.relay import read_at_most
from proxy.store.tool_verdicts import ToolVerdictRepository

log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
PROBE_S = 120.0
"""The most seconds that one probe takes: a busy engine answers late."""
DOUBTED_AFTER_S = 60.0
"""Seconds until the next probe, after a refusal that contradicts a verdict or a probe that
failed."""
MAX_PROBES = 4
"""The most probes at one time; a later request starts the others."""
MAX_MODELS = 1024
"""The most names that each table keeps: clients can make up names of models."""
_TOKENIZE = "/tokenize"
_APPLY_TEMPLATE = "/apply-template"
MAX_ANSWER_BYTES = 4 << 20
"""The longest answer of the server. llama.cpp's properties contain a whole chat template."""
MAX_VERSION_CHARS = 200
MAX_TOKENS = 1
"""The tokens that each of at most two completions of a probe may generate."""
_TOOL = {
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

_VERSIONS: Sequence[tuple[str, Sequence[str]]] = (
    ("/version", ("version",)),  # vLLM
    ("/props", ("build_info", "chat_template", "model_path")),  # llama.cpp
    ("/get_server_info", ("version", "tool_call_parser", "chat_template")),  # SGLang
    ("/api/version", ("version",)),  # Ollama
)
"""Endpoints that report the engine, with the fields that make up its version. The first field must
be there."""


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The setting `backend.tool_support` and its exceptions by model."""

    usual: ToolSupport = "always"
    by_model: Sequence[tuple[str, ToolSupport]] = ()
    """Names of models, or patterns (`*`), with their settings; the first match holds."""

    def for_model(self, model: str) -> ToolSupport:
        """Return the setting for a model."""
        matching = (setting for pattern, setting in self.by_model if fnmatchcase(model, pattern))
        return next(matching, self.usual)


class ToolProbe:
    """Asks a backend's server whether a model's chat template passes tools on. A probe costs one or
    two generated tokens.

    `is_local` is True if the server's prompt counts are trusted even if it does not report its
    engine.
    """

    def __init__(self, model: Model, *, is_local: bool = True) -> None:
        self._model = model
        self._is_local = is_local

    async def models(self) -> list[str]:
        """Return the names of the models that the backend lists. Raises BackendError."""
        return [str(each.get("id")) for each in await self._model.models()]

    async def version(self) -> str | None:
        """Return the engine's version, with the other fields that affect tools, or None if the
        server reports none. Raises BackendError."""
        passage = self._model.passage
        if passage is None:
            return None
        for path, fields in _VERSIONS:
            told = await _fetch_json(passage, "GET", path)
            if isinstance(told, dict) and isinstance(told.get(fields[0]), str):
                written = " ".join(_short(told.get(field)) for field in fields)
                return f"{path} {written}"[:MAX_VERSION_CHARS]
        return None

    async def verdict(self, name: str, version: str | None) -> ToolVerdict | None:
        """Return the verdict on a model, or None if it cannot be found out. Raises BackendError."""
        passage = self._model.passage
        if passage is None or (version is None and not self._is_local):
            return None
        messages = _greeting()
        passed_on = await _template_passes_tools(passage, name, messages)
        try:
            with_tools = await self._prompt_tokens(name, messages, [_TOOL])
        except ToolsRefusedError as error:
            return refused(name, error.message)
        if passed_on:
            return SUPPORTED
        without = await self._prompt_tokens(name, messages, [])
        if not with_tools or not without:
            return None
        return SUPPORTED if with_tools > without else ignored(name)

    async def refusal(self, name: str) -> ToolVerdict | None:
        """Return the verdict against a model whose backend refuses a request with a harmless tool,
        else None. Raises BackendError."""
        try:
            await self._prompt_tokens(name, _greeting(), [_TOOL])
        except ToolsRefusedError as error:
            return refused(name, error.message)
        return None

    async def _prompt_tokens(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> int:
        body = {"model": name, "messages": messages, "max_tokens": MAX_TOKENS}
        if tools:
            body["tools"] = tools
        reply = await self._model.complete(body, None)
        return tokens(reply.usage, "prompt_tokens")


def _greeting() -> list[dict[str, Any]]:
    """Return messages that are in no cache."""
    return [{"role": "user", "content": f"Hi {secrets.token_hex(3)}"}]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else sha256(text.encode(errors="replace")).hexdigest()[:16]


async def _template_passes_tools(
    passage: UpstreamPaths, name: str, messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Return True if the server's tokenizer or template shows that a tool makes the prompt longer.
    False decides nothing: older vLLMs ignore the tools here."""
    for path in (_TOKENIZE, _APPLY_TEMPLATE):
        body: dict[str, Any] = {"model": name, "messages": messages}
        without = _size(await _fetch_json(passage, "POST", path, body))
        if without:
            body["tools"] = [_TOOL]
            return _size(await _fetch_json(passage, "POST", path, body)) > without
    return False


def _size(told: Any) -> int:
    """Return a prompt's size: in tokens if vLLM counts it, in characters if llama.cpp renders
    it."""
    if not isinstance(told, dict):
        return 0
    count, prompt = told.get("count"), told.get("prompt")
    if isinstance(count, int):
        return count
    return len(prompt) if isinstance(prompt, str) else 0


async def _fetch_json(
    passage: UpstreamPaths, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """Return the JSON at a path of the server, or None. Raises BackendError if there is no
    answer."""
    written = None if body is None else json.dumps(body).encode()
    headers = {"accept": "application/json"}
    if written is not None:
        headers["content-type"] = "application/json"
    relayed = await passage.pass_on(UpstreamRequest(method, path, headers, written))
    if relayed.status != 200:
        await relayed.body.aclose()
        return None
    read = await read_at_most(relayed.body, MAX_ANSWER_BYTES)
    try:
        return None if read is None else parsed(read)
    except BackendError:
        return None


class ToolVerdicts:
    """Keeps the verdicts on the models of one backend.

    Without a probe, verdicts come from the settings and runs alone. Without a shelf, they last as
    long as the process.
    """

    def __init__(
        self,
        settings: ToolSettings = ToolSettings(),
        probe: ToolProbe | None = None,
        shelf: ToolVerdictRepository | None = None,
        backend: str = "",
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._probe = probe
        self._shelf = shelf
        self._backend = backend
        self._now = now
        self._known: dict[str, KnownVerdict] = {}
        self._check_at: dict[str, float] = {}
        """The time from which on a model may be probed again."""
        self._doubted: set[str] = set()
        """Models that a probe found to use tools, and that have been refused tools since."""
        self._evidence: dict[tuple[str, str], tuple[float, ToolVerdict]] = {}
        """By key and model: the verdict from the key's runs, and until when it holds."""
        self._work: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> None:
        """Load the verdicts of earlier processes."""
        if self._shelf is None:
            return
        self._known = await self._shelf.all(self._backend)
        for model, known in self._known.items():
            if self._settings.for_model(model) == "probe":
                _warn(known.verdict)

    def verdict_for(self, owner: str, model: str) -> ToolVerdict:
        """Return the verdict for a request of this key, without waiting. A model without a verdict
        is given tools, and a probe of it starts in the background."""
        setting = self._settings.for_model(model)
        if setting != "probe":
            return SUPPORTED if setting == "always" else never(model)
        self._look_at(model)
        known = self._known.get(model)
        if known is not None and known.verdict.reason:
            return known.verdict
        until, verdict = self._evidence.get((owner, model), (0.0, SUPPORTED))
        return verdict if self._now() < until else SUPPORTED

    def note_refusal(self, model: str, said: str) -> ToolVerdict:
        """Note that the backend refused a request for its tools, with these words; return the
        verdict on this request. It holds for others once the backend has refused the probe's own
        request as well: the words may be the client's. Where a probe found that the model uses
        tools, its verdict stays until the next probe, which is soon."""
        if self._settings.for_model(model) != "probe":
            return SUPPORTED
        known, work = self._known.get(model), f"refusal {model}"
        if known is None:
            if self._probe is not None and work not in self._work and len(self._work) < MAX_PROBES:
                self._do(work, partial(self._confirm, self._probe, model))
        elif known.verdict.reason is None and model not in self._doubted:
            self._doubted.add(model)
            _put(self._check_at, model, self._now() + DOUBTED_AFTER_S)
        return refused(model, said)

    def note_run(self, owner: str, result: Result) -> None:
        """Note the trouble that a run had with tools; it counts for the key of the run only."""
        if self._settings.for_model(model := result.model) != "probe":
            return
        runs = (result, *result.others)
        trouble = {word for each in runs for word in each.tool_trouble}
        # Calls of unknown tools count as commands, but take no memory.
        ran = any(each.stats.peak_mem_bytes or each.stats.cpu_ms for each in runs)
        if not is_evidence(trouble, has_run_commands=ran):
            return
        verdict = failed(model, trouble)
        log.warning("run %s: no tools for its key now: %s", result.run_id, verdict.words)
        _put(self._evidence, (owner, model), (self._now() + EVIDENCE_HOLDS_S, verdict))

    async def wait_idle(self) -> None:
        """Wait until no probe runs and everything is saved."""
        while self._work:
            await asyncio.wait(list(self._work.values()))
            await asyncio.sleep(0)  # for the callbacks that remove them from the table

    async def aclose(self) -> None:
        """Cancel the probes that run. Safe to call twice."""
        for work in self._work.values():
            work.cancel()
        await self.wait_idle()

    # In the background

    def _look_at(self, model: str) -> None:
        if self._probe is None or model in self._work or len(self._work) >= MAX_PROBES:
            return
        if self._now() >= self._check_at.get(model, 0.0):
            _put(self._check_at, model, self._now() + CHECK_EVERY_S)
            self._do(model, partial(self._find_out, self._probe, model))

    def _do(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        async def done() -> None:
            try:
                await work()
            except Exception:
                log.exception("a verdict on a model's tool support could not be saved")

        self._work[name] = asyncio.create_task(done())
        self._work[name].add_done_callback(lambda _: self._work.pop(name, None))

    async def _find_out(self, probe: ToolProbe, model: str) -> None:
        known = self._known.get(model)
        try:
            async with asyncio.timeout(PROBE_S):
                is_listed = model in await probe.models()
                version = await probe.version() if is_listed else None
                verdict = await self._probed(probe, model, version) if is_listed else None
        except (BackendError, TimeoutError) as error:
            log.debug("whether the model %r uses tools could not be found out: %s", model, error)
            _put(self._check_at, model, self._now() + DOUBTED_AFTER_S)
            version, verdict = known.version if known else None, None
        if verdict is not None:
            self._doubted.discard(model)
            found = KnownVerdict(verdict, version, self._now())
            self._know(model, found)
            await self._save(model, found)
        elif known is not None and known.is_outdated(version, self._now()):
            await self._forget(model)

    async def _confirm(self, probe: ToolProbe, model: str) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                verdict = await probe.refusal(model)
        except (BackendError, TimeoutError) as error:
            log.debug("whether the model %r is refused tools was not told: %s", model, error)
            return
        if verdict is not None and model not in self._known:
            self._check_at.pop(model, None)
            found = KnownVerdict(verdict, None, self._now())
            self._know(model, found)
            await self._save(model, found)

    async def _probed(
        self, probe: ToolProbe, model: str, version: str | None
    ) -> ToolVerdict | None:
        """Return a new verdict, or None where the known one still holds. A verdict against tools is
        checked each time: an operator who follows its advice restarts the same engine version."""
        known = self._known.get(model)
        if known is None or known.verdict.reason or model in self._doubted:
            return await probe.verdict(model, version)
        outdated = known.is_outdated(version, self._now())
        return await probe.verdict(model, version) if outdated else None

    def _know(self, model: str, found: KnownVerdict) -> None:
        before = self._known.get(model)
        _put(self._known, model, found)
        if before is None or before.verdict != found.verdict:
            _warn(found.verdict)

    async def _save(self, model: str, known: KnownVerdict) -> None:
        if self._shelf is not None:
            await self._shelf.save(self._backend, model, known)

    async def _forget(self, model: str) -> None:
        self._known.pop(model, None)
        if self._shelf is not None:
            await self._shelf.forget(self._backend, model)


def _warn(verdict: ToolVerdict) -> None:
    if verdict.reason:
        log.warning("no tools, and so no sandbox: %s", verdict.words)


def _error_for_loop(verdict: ToolVerdict, error: ToolsRefusedError) -> BackendError:
    """Return the error that the loop gets for a refusal. With `tool_support: always` it is a
    failure like any other, and no reason to answer without tools."""
    if verdict.reason:
        return no_tools_error(verdict)
    return BackendError(
        error.message, status=error.status, type=error.type, code=error.code, param=error.param
    )


def _put(kept: dict[K, V], key: K, value: V) -> None:
    """Put a value in, and take the oldest out above `MAX_MODELS`."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_MODELS:
        kept.pop(next(iter(kept)))


class WatchedModel:
    """Measures the model calls of runs. Notes the refusals of tools of a model's backend, and
    raises them in the words of the verdict."""

    def __init__(self, model: Model, verdicts: ToolVerdicts, metrics: Metrics) -> None:
        self._model = model
        self._verdicts = verdicts
        self._metrics = metrics

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See Model."""
        try:
            return await self._metrics.model_call(self._model.complete, body, on_delta)
        except ToolsRefusedError as error:
            if is_quoted(error.words, body):
                raise  # the client's own words decide nothing for others
            verdict = self._verdicts.note_refusal(str(body.get("model")), error.message)
            raise _error_for_loop(verdict, error) from error

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """See Model."""
        return await self._model.relay(body, headers)

    def for_client(self, credentials: Credentials) -> "WatchedModel":
        """See Model."""
        return WatchedModel(self._model.for_client(credentials), self._verdicts, self._metrics)

    def with_timeout(self, timeout_s: float) -> "WatchedModel":
        """See Model."""
        return WatchedModel(self._model.with_timeout(timeout_s), self._verdicts, self._metrics)

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model."""
        return await self._model.count_tokens(model, text)

    @property
    def passage(self) -> UpstreamPaths | None:
        """See Model."""
        return self._model.passage

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model."""
        return self._model.keep_warm()

    async def models(self) -> list[dict[str, Any]]:
        """See Model."""
        return await self._model.models()

    async def aclose(self) -> None:
        """See Model."""
        await self._model.aclose()
