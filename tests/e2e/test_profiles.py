"""Each shipped profile, from request to answer: what it allows and what it refuses."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import yaml

from policies.egress import PRESETS
from proxy.audit.audit import AuditLogs
from proxy.audit.audit_log import verify
from proxy.config import parse
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, tool_reply
from proxy.profiles import build_profiles, shipped_profiles
from proxy.runs.manager import RunManager
from tests.e2e.networks import addresses_of
from tests.fakes.backend import scripted_backend
from tests.fakes.server import Kind, running_proxy

TIMEOUT_S = 120.0
OPEN = {"isolation": {"network": {"mode": "open"}}}
FINANCE = yaml.safe_load(
    (Path(__file__).parents[2] / "examples" / "configs" / "finance.yaml").read_text("utf-8")
)
SECRET = "sk-proj-" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gH3kM5oQ7sU9w"
DIAL = "python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 2)'"
UNREACHABLE = "Network is unreachable"


@dataclass(frozen=True)
class Exchange:
    """A response and what the model received."""

    response: httpx.Response
    model_input: Sequence[str]
    """The system prompt, then the observations."""

    @property
    def body(self) -> Any:
        return self.response.json()


async def exchange(
    home: Path,
    profile: str,
    *turns: str | tuple[str, ...],
    tree: dict[str, Any] | None = None,
    key: Key | None = None,
    kind: Kind = "bubblewrap",
    **body: Any,
) -> Exchange:
    """Send a request under the profile, with a key that lists it unless `key` is given.

    The model calls for one command in each turn, or for several.
    """
    config = parse(tree or {}, "c.yaml")
    steps = [
        tool_reply(*(call("execute_bash", command=command) for command in commands))
        for commands in ((turn,) if isinstance(turn, str) else turn for turn in turns)
    ]
    audit_logs = AuditLogs(home / "audit", keep_days=1, key=None)
    make_runs: Any = partial(RunManager, audit_logs=audit_logs)
    async with (
        scripted_backend([*steps, tool_reply(call("submit", answer="Done."))]) as backend,
        running_proxy(
            backend,
            kind,
            home,
            profiles=build_profiles(config),
            keyring=Keyring([("sk-1", key or Key("one", (profile,)))]),
            make_runs=make_runs,
        ) as url,
        httpx.AsyncClient(timeout=TIMEOUT_S) as client,
    ):
        sent = {"model": "m", "messages": [{"role": "user", "content": "Go on."}], **body}
        headers = {"authorization": "Bearer sk-1", "x-sandbox-profile": profile}
        with anyio.fail_after(TIMEOUT_S):
            response = await client.post(f"{url}/v1/chat/completions", json=sent, headers=headers)
        if not backend.requests:
            return Exchange(response, ())
        messages = backend.requests[-1].body["messages"]
        model_input = [m["content"] for m in messages if m["role"] in ("system", "tool")]
        return Exchange(response, model_input)


async def test_default_profile_runs_as_root_without_network_and_returns_files(
    tmp_path: Path,
) -> None:
    seen = await exchange(tmp_path, "default", "id -u; seq 3 | paste -sd+ | bc > output/a", DIAL)
    prompt, made, dialed = seen.model_input
    assert "answer simple things directly" in prompt
    assert "\n0" in made
    assert [file["filename"] for file in seen.body["sandbox"]["files"]] == ["a"]
    assert UNREACHABLE in dialed


async def test_profile_without_network_reaches_nothing(tmp_path: Path) -> None:
    offline = {"offline": {"isolation": {"network": {"mode": "none"}}}}
    tree = {**OPEN, "profiles": offline}
    reached = await exchange(tmp_path, "offline", DIAL, "curl -sS http://example.com", tree=tree)
    _, dialed, fetched = reached.model_input
    assert UNREACHABLE in dialed
    assert "this sandbox has no network" in fetched
    anyone = await exchange(tmp_path, "offline", tree=tree, key=Key("any"))
    assert anyone.response.status_code == 200  # stricter than the default, so every key may use it


async def test_research_profile_reaches_only_package_registries(tmp_path: Path) -> None:
    registries = [host for name in ("pypi", "npm") for host in PRESETS[name]]
    tree = {"isolation": {"network": {"allowed_cidrs": addresses_of(registries)}}}
    seen = await exchange(
        tmp_path,
        "research",
        "curl -sS -o /dev/null -w '%{http_code}' https://pypi.org/simple/six/",
        "curl -sS http://example.com",
        tree=tree,
    )
    prompt, found, refused = seen.model_input
    assert "Derive every answer with it" in prompt
    assert "deb.debian.org" in prompt
    assert found.endswith("200")
    assert "example.com is not in this sandbox's allowlist" in refused
    denied = await exchange(tmp_path, "research", key=Key("any"))
    assert denied.response.status_code == 403


async def test_strict_profile_runs_unprivileged_with_small_limits(tmp_path: Path) -> None:
    seen = await exchange(
        tmp_path,
        "strict",
        "id -u; touch /testbed/mine && echo here",
        "touch /usr/theirs",
        "python3 -c 'b = bytearray(700 << 20)'",
        DIAL,
        "sleep 100",
        tree=OPEN,
        key=Key("any"),
        sandbox={"limits": {"command_timeout_s": 5}},
    )
    _, mine, theirs, large, dialed, slow = seen.model_input
    assert "here" in mine
    assert "\n0" not in mine
    assert "Read-only file system" in theirs or "Permission denied" in theirs
    assert "out of memory" in large
    assert UNREACHABLE in dialed
    assert "timed out after 5 s" in slow
    many = await exchange(tmp_path, "strict", n=2)
    assert (many.response.status_code, many.body["error"]["param"]) == (400, "n")


async def test_finance_profile_allows_reading_data_denies_orders_and_writes_an_audit_log(
    tmp_path: Path,
) -> None:
    table = base64.b64encode(b"day,close\n1,10\n2,12\n").decode()
    content = [
        {"type": "text", "text": "How does it do?"},
        {
            "type": "file",
            "file": {"filename": "prices.csv", "file_data": f"data:text/csv;base64,{table}"},
        },
    ]
    desk = {"extends": "finance", "isolation": {"network": {"mode": "open"}}}
    tree = {**FINANCE, "profiles": {**FINANCE["profiles"], "desk": desk}}
    seen = await exchange(
        tmp_path,
        "desk",
        "tail -n1 documents/prices.csv",
        "curl -sS http://api.alpaca.markets/v2/orders",
        f"echo key {SECRET}",
        tree=tree,
        messages=[{"role": "user", "content": content}],
    )
    _, data, order, secret = seen.model_input
    assert data.endswith("2,12")
    assert "no orders are placed from here" in order
    assert SECRET not in secret
    assert {str(found.state) for found in verify(tmp_path / "audit", None, (), keep_days=1)} == {
        "ok"
    }
    log = next(path for path in (tmp_path / "audit").rglob("*.jsonl") if path.stem != "index")
    assert "tail -n1 documents/prices.csv" in log.read_text("utf-8")
    assert SECRET not in log.read_text("utf-8")
    plain = await exchange(tmp_path, "finance", model="m:plain", tree=tree)
    assert (plain.response.status_code, plain.body["error"]["param"]) == (403, "sandbox.enabled")


async def test_paper_profile_has_a_stateless_shell_and_one_call_per_turn(tmp_path: Path) -> None:
    turn = ("cd /tmp; x=1; seq 100", "touch second-call")
    seen = await exchange(tmp_path, "paper", turn, 'pwd; echo "x=$x"; ls')
    _, many, forgotten = seen.model_input
    assert many.startswith("Exit code: 0\nExecution output of \\[execute_bash]:\n\\[STDOUT]\n")
    assert "<Observation truncated in middle for saving context>" in many
    assert "/testbed\nx=\n" in forgotten
    assert "second-call" not in forgotten
    assert "\nSteps Remaining: 98" in forgotten
    denied = await exchange(tmp_path, "paper", key=Key("any"))
    assert denied.response.status_code == 403


def test_every_shipped_profile_has_a_test() -> None:
    text = Path(__file__).read_text("utf-8")
    # tests/clients/test_paper_domains.py tests the profiles of the paper's domains.
    names = [name for name in shipped_profiles() if not name.startswith("paper-")]
    assert all(f"test_{name}_" in text for name in names)
