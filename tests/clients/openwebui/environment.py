"""The browser, Open WebUI, proxy and model that a scenario uses."""

from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.openwebui.chat import Chat
from tests.clients.openwebui.model import Model
from tests.fakes.backend import ScriptedBackend

TIMEOUT_S = 30.0


@dataclass
class Environment:
    """A browser, connected to Open WebUI, the proxy and the scripted model."""

    chat: Chat
    proxy_url: str
    backend: ScriptedBackend
    model: Model
    marker: str
    """A word in the command line of the command that never ends."""
    third_party_urls: list[str] = field(default_factory=list)
    """URLs that the browser requested from third parties."""

    async def metric(self, name: str) -> float:
        """Return the value of a metric of the proxy, summed over its labels."""
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{self.proxy_url}/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == name
        )

    @property
    def run_requests(self) -> list[list[dict[str, Any]]]:
        """The messages of each backend request that came from a run."""
        return [r.body["messages"] for r in self.backend.requests if "tools" in r.body]

    @property
    def relayed_requests(self) -> list[list[dict[str, Any]]]:
        """The messages of each relayed backend request."""
        return [r.body["messages"] for r in self.backend.requests if "tools" not in r.body]

    async def wait_for_relayed_requests(self, count: int) -> None:
        """Wait until `count` requests were relayed."""
        with anyio.fail_after(TIMEOUT_S):
            number = 0
            while len(self.relayed_requests) < count:
                number += 1
                await self.backend.arrived(number)
