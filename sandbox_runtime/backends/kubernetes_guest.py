"""A running Pod: the byte stream of its guest agent, the cause of its end, and its removal."""

import asyncio
import logging
from collections.abc import Callable

from policies.isolation import Isolation
from sandbox_runtime.backends.base import DataCallback, LimitEvents
from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_errors import (
    KubernetesError,
    cause_of_end,
    has_ended,
    has_stopped,
)
from sandbox_runtime.backends.kubernetes_stream import AttachedStream
from sandbox_runtime.backends.kubernetes_watch import PodWatch
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

CAUSE_WAIT_S = 3.0
"""Maximum time to wait until the API server knows why a Pod has ended. The kubelet reports the
cause after the attached connection has ended."""
STOP_WAIT_S = 10.0
"""Maximum time until a deleted Pod has stopped; its node may not answer."""


class KubernetesGuest:
    """One Pod. After its removal has succeeded or failed, `on_end` is called with its name."""

    def __init__(
        self, name: str, api: KubernetesApi, watch: PodWatch, on_end: Callable[[str], None]
    ) -> None:
        self.stream: AttachedStream | None = None
        """The standard streams of the agent; None until the Pod runs and is attached."""
        self._name = name
        self._api = api
        self._watch = watch
        self._on_end = on_end
        self._cause = ""
        self._removal: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._name

    async def listen(self, on_data: DataCallback) -> None:
        assert self.stream
        await self.stream.listen(on_data)
        if self._removal is None:
            self._cause = await self._find_cause()

    async def drain(self) -> None:
        assert self.stream
        await self.stream.drain()

    def write(self, data: bytes) -> None:
        assert self.stream
        self.stream.write(data)

    def write_control(self, data: bytes) -> None:
        assert self.stream
        self.stream.write_control(data)

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
        printed = self.stream.stderr_tail() if self.stream else ""
        return "\n".join(filter(None, (printed, self._cause)))

    async def _remove(self) -> None:
        if self.stream:
            self.stream.abort()
        try:
            await self._api.delete_pod(self._name)
            if not await self._watch.wait(self._name, has_stopped, STOP_WAIT_S):
                logger.warning("%s still runs after %g s", self._name, STOP_WAIT_S)
        except KubernetesError as error:
            logger.warning("%s could not be removed, a sweep tries again: %s", self._name, error)
        finally:
            self._on_end(self._name)
            if self.stream:
                await self.stream.wait_closed()

    async def _find_cause(self) -> str:
        """Return why the stream has ended, or an empty string if the agent ended by itself."""
        is_over = await self._watch.wait(
            self._name, lambda pod: pod is None or has_ended(pod), CAUSE_WAIT_S
        )
        if is_over:
            return cause_of_end(self._watch.pod(self._name))
        assert self.stream
        return f"the API server closed the connection {self.stream.status()}".strip()
