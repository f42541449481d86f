"""The states of one owner's Pods, kept current by a watch of the API server."""

import asyncio
import logging
from collections.abc import Callable

from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_errors import ExpiredError, Json, KubernetesError

logger = logging.getLogger(__name__)

_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 10.0


class PodWatch:
    """The Pods that a label selector selects. One watch serves all of them, so that thousands of
    sandboxes cost the API server one request."""

    def __init__(self, api: KubernetesApi, selector: str) -> None:
        self._api = api
        self._selector = selector
        self._pods: dict[str, Json] = {}
        self._changed = asyncio.Event()
        """An event that is set at the next change; each change replaces it by a new event."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the watch, unless it runs already."""
        self._task = self._task or asyncio.create_task(self._follow(), name="watch of Pods")

    def pod(self, name: str) -> Json | None:
        """Return the newest known state of a Pod; None if it is removed or not yet seen."""
        return self._pods.get(name)

    async def wait(
        self, name: str, is_over: Callable[[Json | None], bool], timeout_s: float
    ) -> bool:
        """Wait until `is_over` returns True for the state of a Pod; return False if it did not
        within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_over(self._pods.get(name)):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Stop watching."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        retry_s = _MIN_RETRY_S
        while True:
            try:
                version = await self._load_pods_and_version()
                retry_s = _MIN_RETRY_S
                while True:
                    version = await self._watch(version)
            except ExpiredError:
                continue
            except KubernetesError as error:
                logger.warning("the Pods cannot be watched, again in %g s: %s", retry_s, error)
            await asyncio.sleep(retry_s)
            retry_s = min(_MAX_RETRY_S, 2 * retry_s)

    async def _load_pods_and_version(self) -> str:
        found, version = await self._api.pods_and_version(self._selector)
        self._pods = {pod["metadata"]["name"]: pod for pod in found}
        self._wake()
        return version

    async def _watch(self, version: str) -> str:
        """Follow the changes since a version until the API server ends the watch. Return the
        version of the last change."""

        def on_event(kind: str, pod: Json) -> None:
            nonlocal version
            version = pod["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._pods.pop(pod["metadata"]["name"], None)
            elif kind != "BOOKMARK":
                self._pods[pod["metadata"]["name"]] = pod
            self._wake()

        await self._api.watch_pods(self._selector, version, on_event)
        return version

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
