"""A neighbour that works beside each attack: commands in its own sandbox, and /health.

`Range` contains the server, the model of both clients, and the measurement of one attack.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from proxy.models.scripted import call, tool_reply
from tests.attacks.health import HealthSamples, watch_health
from tests.attacks.report import Finding
from tests.attacks.server import ATTACKER, NEIGHBOUR, AttackedServer, attacked_server
from tests.fakes.backend import Handler, Held, Item, Refusal, scripted_backend

MAX_STALL_MS = 100.0
"""The longest wait for /health that the server itself may cause (the target of the benchmark)."""
MAX_SHARED_STALL_MS = 250.0
"""The longest wait for /health beside a sandbox that uses all processors, which the kernel divides
between the sandboxes and the server. docs/security.md has its 99th percentile."""
MAX_SLOWER = 20.0
"""The ratio of the median of the neighbour's commands to that without the attack."""
MAX_GROWTH_MIB = 64.0
"""Growth of the server's memory that a hostile guest may cause (docs/security.md)."""
IDLE_S = 1.0
"""Time that the neighbour works before the attack, and at least beside it, in seconds."""
WARM_UP_COMMANDS, COMMANDS_AFTER = 2, 3
"""Numbers of the neighbour's commands before it is measured, and after the attack."""
ATTACK_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
_POLL_S = 0.01
CHAT = "/v1/chat/completions"
NEIGHBOUR_MODEL = "neighbour"
WELL = "echo well"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attack, without its effect on others."""

    held: bool
    figures: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The effect that an attack may have on others."""

    stall_ms: float = MAX_STALL_MS
    growth_mib: float = MAX_GROWTH_MIB


SHARED = Bounds(MAX_SHARED_STALL_MS)
"""The bounds of attacks from inside a sandbox."""


@dataclass
class _Neighbour:
    """Runs one command again and again in one run, and records each duration and output."""

    command: str
    durations_ms: list[float] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _sent_at: float | None = None

    def reply(self, body: Mapping[str, Any]) -> Item:
        """Return the next command, which is sent after a pause, or the end of the run."""
        if self._sent_at is not None:
            self.durations_ms.append((time.perf_counter() - self._sent_at) * 1000)
            self.outputs.append(str(body["messages"][-1]["content"]))
        if self.is_stopping:
            return tool_reply(call("submit", answer="done"))
        released = asyncio.Event()
        asyncio.get_running_loop().call_later(_PAUSE_S, self._release, released)
        text = f": {len(self.outputs)}\n{self.command}"
        return Held(tool_reply(call("execute_bash", command=text)), released)

    def _release(self, released: asyncio.Event) -> None:
        self._sent_at = time.perf_counter()
        released.set()

    def unfinished_ms(self) -> float:
        """Return the duration so far of the command that is running, in ms."""
        return 0.0 if self._sent_at is None else (time.perf_counter() - self._sent_at) * 1000

    async def finish(self, count: int) -> None:
        """Wait for `count` further commands."""
        wanted = len(self.durations_ms) + count
        while len(self.durations_ms) < wanted:  # noqa: ASYNC110 - the model records them
            await asyncio.sleep(_POLL_S)


class Range:
    """A server, an attacker and a neighbour. Both clients' models are one scripted backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        """The sandbox backend's name in the table."""
        self.server: AttackedServer
        self.http: httpx.AsyncClient
        """The attacker's client."""
        self.requests: list[dict[str, Any]] = []
        """The bodies of the attacker's model calls since the beginning of the attack."""
        self.last_answer: dict[str, Any] = {}
        """The proxy's part of the answer to the last command's request."""
        self.replies: Sequence[Item] = ()
        """The replies of the attacker's model, by the number of assistant messages."""
        self._neighbour = _Neighbour(WELL)

    def reply(self, body: dict[str, Any]) -> Item:
        """Return the model's reply: that of the neighbour, or the attack's next one."""
        if body["model"] == NEIGHBOUR_MODEL:
            return self._neighbour.reply(body)
        self.requests.append(body)
        number = sum(message["role"] == "assistant" for message in body["messages"])
        if number < len(self.replies):
            return self.replies[number]
        return Refusal(500, "the script has no more")

    async def ask(self, replies: Sequence[Item], **body: Any) -> httpx.Response:
        """Send the attacker's request, which its model answers with `replies`."""
        self.replies = replies
        question = {
            "model": "attacker",
            "messages": [{"role": "user", "content": f"Work. {time.time_ns()}"}],
        }
        return await self.http.post(CHAT, json={**question, **body})

    async def run_inside(self, command: str, timeout_s: int, **body: Any) -> str:
        """Run a command in a sandbox of the attacker. Return the observation of the model."""
        replies = [
            tool_reply(call("execute_bash", command=command, timeout_s=timeout_s)),
            tool_reply(call("submit", answer="done")),
        ]
        answer = await self.ask(replies, **body)
        self.last_answer = answer.json().get("sandbox") or {}
        return self.observations()[-1] if self.observations() else "the run ended without a result"

    def observations(self) -> list[str]:
        """Return the contents of the tool messages that the attacker's model has received."""
        messages = self.requests[-1]["messages"] if self.requests else []
        return [str(each["content"]) for each in messages if each["role"] == "tool"]

    async def measure(
        self,
        name: str,
        attack: Callable[[], Awaitable[Outcome]],
        *,
        command: str = WELL,
        neighbour_options: Mapping[str, Any] | None = None,
        bounds: Bounds = Bounds(),
        is_known_gap: bool = False,
    ) -> Finding:
        """Make an attack while the neighbour works, and compare the neighbour before and during.

        `neighbour_options` are further fields of the neighbour's request.
        """
        try:
            await self.server.settle()
        except TimeoutError:
            return Finding(name, self.backend, False, "sandboxes of the attack before it are left")
        self.requests = []
        tracebacks = self.server.tracebacks()
        async with (
            watch_health(self.server.port) as health,
            self._working(command, neighbour_options or {}) as worker,
        ):
            await worker.finish(WARM_UP_COMMANDS)
            worker.durations_ms.clear()
            began = time.perf_counter()
            await asyncio.sleep(IDLE_S)
            idle_ms, before = worker.durations_ms[:], len(worker.outputs)
            worker.durations_ms.clear()
            self.server.reset_peak()
            memory_mib, attacked_at = self.server.peak_mib(), time.perf_counter()
            outcome = await self._attack(attack)
            worker_ms, ended_at = worker.durations_ms[:], time.perf_counter()
            growth_mib = self.server.peak_mib() - memory_mib
            is_working = await _is_working(worker)
            idle_health = await health.between(began, attacked_at)
            attacked_health = await health.between(attacked_at, ended_at)
        idle_ms, worker_ms = idle_ms or [0.0], worker_ms or [worker.unfinished_ms()]
        expected = set(worker.outputs[:before])
        different = [each for each in worker.outputs if each not in expected]
        faults = [
            *([] if outcome.held else ["the attack"]),
            *([] if is_working else ["the neighbour's commands"]),
            *([f"the neighbour's results ({different[0][-60:]!r})"] if different else []),
            *(["median of commands"] if median(worker_ms) > MAX_SLOWER * median(idle_ms) else []),
            *(
                ["/health"]
                if attacked_health.worst_ms > _stall(bounds, idle_health, attacked_health)
                else []
            ),
            *(["memory"] if growth_mib > bounds.growth_mib else []),
            *(["tracebacks in the log"] if self.server.tracebacks() > tracebacks else []),
        ]
        figures = [
            outcome.figures,
            f"commands {median(idle_ms):.0f} -> {median(worker_ms):.0f} ms",
            f"(worst {max(worker_ms):.0f}),",
            f"worst /health {idle_health.worst_ms:.0f} -> {attacked_health.worst_ms:.0f} ms,",
            f"memory {memory_mib:.0f} + {growth_mib:.0f} MiB",
            *([f"| not held: {', '.join(faults)}"] if faults else []),
        ]
        return Finding(name, self.backend, not faults, " ".join(figures), is_known_gap)

    async def _attack(self, attack: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Make the attack, and let the neighbour work beside it for a while."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(ATTACK_TIMEOUT_S):
                outcome = await attack()
        except TimeoutError:
            return Outcome(False, f"no end after {ATTACK_TIMEOUT_S:.0f} s,")
        except httpx.HTTPError as error:
            return Outcome(False, f"{type(error).__name__},")
        await asyncio.sleep(max(0.0, IDLE_S - (time.monotonic() - started)))
        return outcome

    @asynccontextmanager
    async def _working(self, command: str, options: Mapping[str, Any]) -> AsyncIterator[_Neighbour]:
        """Run the neighbour during the block."""
        self._neighbour = _Neighbour(command)
        body = {
            "model": NEIGHBOUR_MODEL,
            "messages": [{"role": "user", "content": f"Work. {time.time_ns()}"}],
            **options,
        }
        headers = {"authorization": f"Bearer {NEIGHBOUR}"}
        async with httpx.AsyncClient(timeout=None) as client:
            run = asyncio.create_task(
                client.post(f"{self.server.url}{CHAT}", json=body, headers=headers)
            )
            try:
                yield self._neighbour
            finally:
                self._neighbour.is_stopping = True
                with suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        await run
                run.cancel()


def _stall(bounds: Bounds, idle: HealthSamples, attacked: HealthSamples) -> float:
    """Return the longest wait for /health that counts as held, in ms: what the attack may add to
    what the machine causes without it."""
    return bounds.stall_ms + max(idle.worst_ms, attacked.scheduling_ms)


async def _is_working(worker: _Neighbour) -> bool:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await worker.finish(COMMANDS_AFTER)
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def firing_range(
    backend: str,
    settings: Mapping[str, Any] | None = None,
    *,
    elsewhere: Handler | None = None,
    agent: bytes | None = None,
) -> AsyncIterator[Range]:
    """Start a server with its model. `elsewhere` serves the model server's other paths.

    Raises RuntimeError if the server does not start with this backend.
    """
    made = Range(backend)
    async with (
        scripted_backend(made.reply, elsewhere=elsewhere) as model,
        attacked_server(backend, model.base_url, settings, agent=agent) as server,
        httpx.AsyncClient(
            base_url=server.url,
            headers={"authorization": f"Bearer {ATTACKER}"},
            timeout=ATTACK_TIMEOUT_S,
        ) as client,
    ):
        made.server, made.http = server, client
        yield made


def stop_reason(answer: httpx.Response) -> str:
    """Return the status of an answer, with its stop reason or error code."""
    try:
        body = answer.json()
    except json.JSONDecodeError:
        return f"{answer.status_code}"
    error = body.get("error") or {}
    reason = error.get("code") or (body.get("sandbox") or {}).get("stop_reason") or ""
    return f"{answer.status_code} {reason}".strip()
