"""What the HTTP surfaces are given to work with."""

from dataclasses import dataclass

from policies.steps import StepsSetting
from proxy.agent.agent import Agent
from proxy.agent.model import Model
from proxy.files import FileStore


@dataclass(frozen=True, slots=True)
class Services:
    """The parts, joined by __main__ or a test."""

    model: Model
    agent: Agent
    files: FileStore
    api_key: str | None = None
    """What clients must send as bearer token; None lets everyone in."""
    public_url: str | None = None
    """How clients reach this server, for links; None takes it from each request."""
    steps: StepsSetting = "auto"
    """How steps are shown to clients that do not say."""
    keep_alive_s: float = 10.0
    """Silence after which a stream says that it is alive; gateways hang up after 50 to 120 s."""
