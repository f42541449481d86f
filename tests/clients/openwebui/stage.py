"""All that a scene is played on."""

import re
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from tests.clients.openwebui.chat import Chat
from tests.clients.openwebui.model import Model
from tests.fakes.backend import ScriptedBackend

NUMBER = re.compile(r"^(sandbox_\w+)(?:\{[^}]*\})? (\d+)$", re.MULTILINE)
PATIENCE_S = 30.0


@dataclass
class Stage:
    """The browser before Open WebUI, Open WebUI before the proxy, and the proxy before a model."""

    chat: Chat
    proxy_url: str
    backend: ScriptedBackend
    model: Model
    marker: str
    """On the command line of what runs until it is stopped."""
    strangers: list[str] = field(default_factory=list)
    """What the browser asked of others."""

    async def number(self, name: str) -> int:
        """One of the proxy's own figures, summed over its labels."""
        async with httpx.AsyncClient() as client:
            told = (await client.get(f"{self.proxy_url}/metrics")).text
        return sum(int(value) for found, value in NUMBER.findall(told) if found == name)

    @property
    def worked(self) -> list[list[dict[str, Any]]]:
        """The messages of each request that came from a run."""
        return [r.body["messages"] for r in self.backend.requests if "tools" in r.body]

    @property
    def relayed(self) -> list[list[dict[str, Any]]]:
        """The same of those that were passed on."""
        return [r.body["messages"] for r in self.backend.requests if "tools" not in r.body]

    async def relayed_in_all(self, count: int) -> None:
        """Wait until so many requests were passed on."""
        with anyio.fail_after(PATIENCE_S):
            number = 0
            while len(self.relayed) < count:
                number += 1
                await self.backend.arrived(number)
