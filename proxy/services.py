"""What the HTTP surfaces are given to work with."""

from dataclasses import dataclass

from policies.storage import FileLimits
from proxy.agent.agent import Agent
from proxy.agent.model import Model
from proxy.files import FileStore
from proxy.store.store import Store
from proxy.wire.steps import Steps


@dataclass(frozen=True, slots=True)
class Services:
    """The parts, joined by __main__ or a test."""

    model: Model
    agent: Agent
    files: FileStore
    file_limits: FileLimits
    """What clients may put in."""
    api_key: str | None = None
    """What clients must send as bearer token; None lets everyone in."""
    public_url: str | None = None
    """How clients reach this server, for links; None takes it from each request."""
    steps: Steps = "reasoning"
    keep_alive_s: float = 10.0
    """Silence after which a stream says that it is alive; gateways hang up after 50 to 120 s."""

    @property
    def store(self) -> Store:
        """Where all that outlives a request is kept."""
        return self.files.store
