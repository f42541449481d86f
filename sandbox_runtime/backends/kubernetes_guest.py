"""A running Pod: the byte stream of its guest agent, the connections that carry it, the cause of
its end, and its removal."""

import asyncio
import logging
from collections.abc import Callable

from policies.isolation import Isolation
from sandbox_runtime.backends.base import DataCallback, LimitEvents
from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_errors import (
    Json,
    KubernetesError,
    cause_of_end,
    has_ended,
    has_stopped,
)
from sandbox_runtime.backends.kubernetes_stream import AttachedStream
from sandbox_runtime.backends.kubernetes_watch import PodWatch
from sandbox_runtime.backends.resumable_stream import ResumableStream
from sandbox_runtime.errors import SandboxGoneError, SandboxStartError
from sandbox_runtime.sandbox import SandboxReference

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
"""Maximum time of one attempt to attach again. The API server may wait longer for a node."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 2.0
STOP_WAIT_S = 10.0
"""Maximum time until a deleted Pod has stopped; its node may not answer."""


class KubernetesGuest:
    """One Pod. After its removal has succeeded or failed, `on_end` is called with its name. The
    removal of an abandoned Pod is left to sweeps.

    If the connection is lost and no packet has arrived for `max_outage_s`, the Pod is given up.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        api: KubernetesApi,
        watch: PodWatch,
        on_end: Callable[[str], object],
        max_outage_s: float,
    ) -> None:
        """`owner` is the id of this process in the Pod's label."""
        self._stream: ResumableStream | None = None
        """Set once the Pod runs and is attached."""
        self._name = name
        self._owner = owner
        self._api = api
        self._watch = watch
        self._on_end = on_end
        self._max_outage_s = max_outage_s
        self._cause = ""
        self._link_token, self._generation = b"", 0
        self._may_be_adopted = False
        """True once a reference was returned: another process may have the Pod by the time of its
        removal."""
        self.is_abandoned = False
        """True if this process has left the Pod to the process that adopts it."""
        self._removal: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._name

    def use_stream(self, stream: AttachedStream, link_token: bytes, generation: int = 0) -> None:
        """Use `stream`, the first connection of this process. If `generation` is 0, the agent has
        got its configuration over `stream`. Otherwise adopt the agent's link from an earlier
        process."""
        self._link_token, self._generation = link_token, generation
        self._stream = ResumableStream(
            link_token, stream, self._attach_again, generation=generation
        )

    async def adopt(self, link_token: bytes, generation: int) -> None:
        """Attach to the agent of a Pod that an earlier process owned. Raises SandboxGoneError."""
        deadline_s = asyncio.get_running_loop().time() + self._max_outage_s
        stream = await self._attach(deadline_s)
        if stream is None:
            why = self._cause or "its agent has ended"
            raise SandboxGoneError(f"Pod {self._name} cannot be adopted: {why}")
        self.use_stream(stream, link_token, generation)

    def reference(self) -> SandboxReference:
        self._may_be_adopted = True
        return {
            "pod": self._name,
            "owner": self._owner,
            "link_token": self._link_token.hex(),
            "generation": self._generation,
        }

    def abandon(self) -> None:
        if self._may_be_adopted and self._removal is None:
            assert self._stream
            self.is_abandoned = True
            self._cause = "its server was found dead"
            self._stream.abort()

    async def receive(self, on_data: DataCallback) -> None:
        assert self._stream
        await self._stream.receive(on_data)

    async def drain(self) -> None:
        assert self._stream
        await self._stream.drain()

    def write(self, data: bytes) -> None:
        assert self._stream
        self._stream.write(data)

    def write_control(self, data: bytes) -> None:
        assert self._stream
        self._stream.write_control(data)

    async def kill(self) -> None:
        # One task for all callers: each waits until the Pod is removed.
        self._removal = self._removal or asyncio.create_task(
            self._remove(), name=f"removal of {self._name}"
        )
        await asyncio.shield(self._removal)

    async def resize(self, isolation: Isolation) -> None:
        raise SandboxStartError(f"the limits of Pod {self._name} cannot be changed: it is running")

    def limit_events(self) -> LimitEvents | None:
        return None  # the agent inside reads the counters of the container

    def diagnostics(self) -> str:
        printed = self._stream.stderr_tail() if self._stream else ""
        return "\n".join(filter(None, (printed, self._cause)))

    async def _remove(self) -> None:
        try:
            if not self.is_abandoned:
                await self._remove_pod()
        finally:
            if self._stream:
                self._stream.abort()
                await self._stream.wait_closed()

    async def _remove_pod(self) -> None:
        try:
            if not self._may_be_adopted:
                if self._stream:
                    self._stream.end()
                await self._api.delete_pod(self._name)
            elif await self._api.delete_pod_of(self._owner, self._name):
                assert self._stream
                self._stream.end()  # not before: the agent would obey even if it was adopted
            else:
                return
            if not await self._watch.wait(self._name, has_stopped, STOP_WAIT_S):
                logger.warning("%s still runs after %g s", self._name, STOP_WAIT_S)
        except KubernetesError as error:
            logger.warning("%s could not be removed, a sweep tries again: %s", self._name, error)
        finally:
            self._on_end(self._name)

    async def _attach_again(self, failures: int) -> AttachedStream | None:
        """Attach to the Pod again and return the connection, or None if the Pod has ended or is
        given up. The pause before the attempt grows with `failures`, the number of connections in
        succession on which the agent did not answer."""
        assert self._stream
        delay_s = min(MAX_RETRY_S, MIN_RETRY_S * 2 ** (failures - 1)) if failures else 0.0
        return await self._attach(self._stream.last_packet_at_s + self._max_outage_s, delay_s)

    async def _attach(self, deadline_s: float, delay_s: float = 0.0) -> AttachedStream | None:
        """Wait `delay_s`, then attach to the Pod, in several attempts if necessary. Return None if
        the Pod has ended, or at the deadline, which is a time of the event loop."""
        why = "it does not answer"
        try:
            async with asyncio.timeout_at(deadline_s):
                # A Pod that is being removed is known to the watch before it is gone.
                while not await self._watch.wait(self._name, _agent_has_ended, delay_s):
                    delay_s = min(MAX_RETRY_S, max(MIN_RETRY_S, 2 * delay_s))
                    try:
                        async with asyncio.timeout(ATTACH_TIMEOUT_S):
                            return await self._api.attach(self._name)
                    except KubernetesError as error:
                        why = str(error)
                    except TimeoutError:
                        why = f"no answer in {ATTACH_TIMEOUT_S:g} s"
        except TimeoutError:
            self._cause = f"no connection to its Pod for {self._max_outage_s:g} s: {why}"
        else:
            self._cause = cause_of_end(self._watch.pod(self._name))
        return None


def _agent_has_ended(pod: Json | None) -> bool:
    """Return True if the agent has certainly ended. A missing Pod object does not prove it: the
    object may be deleted while the Pod runs on a node that is cut off."""
    if pod is None or not has_ended(pod):
        return False
    return pod["status"].get("phase") in ("Failed", "Succeeded") or has_stopped(pod)
