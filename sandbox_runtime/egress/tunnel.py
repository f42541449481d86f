"""A tunnel: bytes both ways, after TLS has shown that it goes where the program said."""

from policies.egress import TLS_PORT
from policies.hosts import Target
from sandbox_runtime.egress.client_hello import FIRST_BYTE, read_hello
from sandbox_runtime.egress.patience import Patience
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay


async def tunnel(relay: Relay, target: Target, patience: Patience) -> None:
    """Pass everything until both sides have finished. Raises ConnectionError, EgressError.

    To port 443 only TLS passes; on other ports TLS is looked at where it is spoken.
    """

    async def up() -> None:
        if target.port == TLS_PORT or await relay.inbox.peek() == FIRST_BYTE:
            await relay.up(await patience.for_head(read_hello(relay.inbox, target)))
        while data := await relay.inbox.some(PIECE_BYTES):
            await relay.up(data)
        relay.finish_up()

    await relay.run(up, relay.rest_down)
