"""What the HTTP surfaces are given to work with."""

from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.agent.agent import Agent
from proxy.agent.model import Model
from proxy.files import FileStore
from proxy.run_counts import RunCounts
from proxy.wire.steps import Steps
from sandbox_runtime.pool.pool import PoolStats


@dataclass(frozen=True, slots=True)
class Services:
    """The parts, joined by __main__ or a test."""

    model: Model
    agent: Agent
    files: FileStore
    pool_stats: Callable[[], PoolStats] | None = None
    """How the pool stands, where there is one."""
    run_counts: RunCounts = field(default_factory=RunCounts)
    api_key: str | None = None
    """What clients must send as bearer token; None lets everyone in."""
    public_url: str | None = None
    """How clients reach this server, for links; None takes it from each request."""
    steps: Steps = "reasoning"
    keep_alive_s: float = 10.0
    """Silence after which a stream says that it is alive; gateways hang up after 50 to 120 s."""
