"""What a sandbox that is lent may reach: its own gateway for as long as the lease."""

from collections.abc import Awaitable, Callable, Collection, Mapping

from policies.egress import Egress
from policies.isolation import Isolation
from sandbox_runtime.egress.decision import OnAsk, OnDecision
from sandbox_runtime.egress.dialer import Endpoint, Resolve, SystemResolver
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.guest_sandbox import GuestSandbox


class WayOut:
    """Makes gateways.

    `forbidden` are the proxy's own and its backends' addresses, which no rule opens; `secrets` the
    environment that `egress.headers` name variables of.
    """

    def __init__(
        self,
        *,
        forbidden: Collection[Endpoint] = (),
        secrets: Mapping[str, str] | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._forbidden = forbidden
        self._secrets = secrets
        self._resolve = resolve or SystemResolver()

    def check(self, egress: Egress) -> None:
        """Raises ValueError for rules that cannot be kept."""
        self._gateway(egress, None, None)

    def open(
        self,
        sandbox: GuestSandbox,
        isolation: Isolation,
        on_decision: OnDecision | None,
        on_ask: OnAsk | None = None,
    ) -> Callable[[], Awaitable[None]]:
        """Let a sandbox out as far as its isolation says; returns what shuts it in again.

        Raises ValueError for rules that cannot be kept.
        """
        gateway = self._gateway(isolation.egress, on_decision, on_ask)
        sandbox.let_out(gateway.serve)
        sandbox.meter = gateway.meter

        async def shut() -> None:
            sandbox.let_out(None)
            await gateway.aclose()

        return shut

    def _gateway(
        self, egress: Egress, on_decision: OnDecision | None, on_ask: OnAsk | None
    ) -> Gateway:
        return Gateway(
            egress,
            resolve=self._resolve,
            forbidden=self._forbidden,
            secrets=self._secrets,
            on_ask=on_ask,
            on_event=on_decision,
        )
