"""Rules for commands, files and hosts: denied actions are not executed, and each is reported."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.egress import Egress
from policies.isolation import Isolation
from policies.profile import Profile
from policies.rules import Rule, RuleSet
from proxy.models.scripted import call, tool_reply
from tests.clients.audit_server import (
    TIMEOUT_S,
    audit_server,
    observations,
    post_once,
    profile_with_rules,
)
from tests.clients.chat_http import post_chat
from tests.clients.test_metrics import numbers
from tests.fakes.backend import Held, scripted_backend

DONE = tool_reply(call("submit", answer="Done."))


def bash(command: str, **more: Any) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command, **more))


def edit(command: str, path: str, **more: Any) -> dict[str, Any]:
    return tool_reply(call("str_replace_editor", command=command, path=path, **more))


def rules_in(response: httpx.Response) -> list[dict[str, Any]]:
    events = response.json()["sandbox"]["events"]
    return [{**event, "run_id": ""} for event in events if event["kind"] == "rule"]


async def test_denied_command_is_not_run_and_its_observation_has_the_reason(tmp_path: Path) -> None:
    rule = Rule("notes", "command", r"\bnotes\b", "deny", "they are mine")
    script = [bash("echo a > notes"), bash("ls"), DONE]
    async with scripted_backend(script) as backend:
        response = await post_once(
            backend, tmp_path, profile_with_rules(rule), sandbox={"steps": "events"}
        )
        denied = "Nothing was done: rule notes forbids this: they are mine."
        assert observations(backend) == [denied, "Exit code: 0\n[stdout]\ndocuments\noutput"]
    assert rules_in(response) == [
        {
            "v": 1,
            "run_id": "",
            "kind": "rule",
            "rule": "notes",
            "action": "deny",
            "over": "command",
            "subject": "echo a > notes",
            "reason": "they are mine",
        }
    ]


async def test_command_that_matches_a_log_rule_is_executed_reported_and_counted(
    tmp_path: Path,
) -> None:
    rules = (Rule("shouting", "command", "(?i)HELLO", "log"), Rule("all", "command", ".", "deny"))
    async with scripted_backend([bash("echo hello"), bash("ls"), DONE]) as backend:
        async with audit_server(backend, tmp_path, profile_with_rules(*rules)) as http:
            with anyio.fail_after(TIMEOUT_S):
                response = await post_chat(http, sandbox={"steps": "events"})
                found = numbers(await http.get("/metrics"))
        flagged, denied = observations(backend)
    assert flagged == "Exit code: 0\n[stdout]\nhello"
    assert denied == "Nothing was done: rule all forbids this."
    assert [event["rule"] for event in rules_in(response)] == ["shouting", "all"]
    assert found['llm_sandbox_rules_met_total{action="log",rule="shouting"}'] == 1
    assert found['llm_sandbox_rules_met_total{action="deny",rule="all"}'] == 1
    assert found['sandbox_rules_met_total{action="flag",rule="shouting"}'] == 1


async def test_input_to_a_job_is_checked_as_a_command(tmp_path: Path) -> None:
    rule = Rule("secret", "command", "opensesame", "deny")
    async with scripted_backend([bash("opensesame", job_id="1"), DONE]) as backend:
        await post_once(backend, tmp_path, profile_with_rules(rule))
        assert observations(backend) == ["Nothing was done: rule secret forbids this."]


@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "/testbed//../etc/./passwd"])
async def test_editor_refuses_a_denied_file_for_every_spelling_of_its_path(
    tmp_path: Path, path: str
) -> None:
    rule = Rule("etc", "file", "^/etc/", "deny")
    script = [edit("view", path), edit("create", "a.txt", file_text="a"), DONE]
    async with scripted_backend(script) as backend:
        await post_once(backend, tmp_path, profile_with_rules(rule))
        refused, made = observations(backend)
    assert refused == "Nothing was done: rule etc forbids this."
    assert made == "Created /testbed/a.txt (1 bytes, 1 lines)."


async def test_denied_artifact_is_left_out_with_a_warning(
    tmp_path: Path,
) -> None:
    rules = (Rule("keys", "file", r"\.pem$", "deny"), Rule("tables", "file", r"\.csv$", "log"))
    submit = tool_reply(call("submit", answer="[k](/testbed/output/k.pem) [t](output/t.csv)"))
    script = [bash("printf k > output/k.pem; printf t > output/t.csv"), submit]
    async with scripted_backend(script) as backend:
        response = await post_once(backend, tmp_path, profile_with_rules(*rules))
    sandbox = response.json()["sandbox"]
    assert [file["filename"] for file in sandbox["files"]] == ["t.csv"]
    assert sandbox["warnings"] == [
        {
            "code": "file_withheld",
            "message": "The file /testbed/output/k.pem is withheld: rule keys forbids this.",
        }
    ]
    assert "[k](/testbed/output/k.pem)" in response.json()["choices"][0]["message"]["content"]


async def test_denied_host_is_not_reached_despite_the_allowlist(
    tmp_path: Path,
) -> None:
    ask_for = (
        "p=${http_proxy##*:}; exec 3<>/dev/tcp/127.0.0.1/${p%/};"
        " printf 'CONNECT orders.example.com:443 HTTP/1.1\\r\\n\\r\\n' >&3; timeout 5 cat <&3"
    )
    rule = Rule("orders", "egress", r"^orders\.", "deny", "nothing is bought here")
    egress = Egress("allowlist", ("*.example.com",))
    profile = Profile(isolation=Isolation(network=egress), watch=RuleSet((rule,)))
    async with scripted_backend([bash(ask_for), DONE]) as backend:
        with anyio.fail_after(2 * TIMEOUT_S):
            async with audit_server(backend, tmp_path, profile, "bubblewrap") as http:
                response = await post_chat(http, sandbox={"steps": "events"})
        (observation,) = observations(backend)
    assert "403" in observation
    assert "rule orders forbids this: nothing is bought here" in observation
    (met,) = rules_in(response)
    assert (met["rule"], met["subject"]) == ("orders", "orders.example.com:443")
    (tried,) = [e for e in response.json()["sandbox"]["events"] if e["kind"] == "egress"]
    assert (tried["verdict"], tried["host"]) == ("denied", "orders.example.com")


async def test_rules_apply_to_each_choice(tmp_path: Path) -> None:
    rule = Rule("notes", "command", "notes", "deny")

    def script(body: dict[str, Any]) -> dict[str, Any] | Held:
        said = any(message["role"] == "assistant" for message in body["messages"])
        return DONE if said else bash("touch notes")

    async with (
        scripted_backend(script) as backend,
        audit_server(backend, tmp_path, profile_with_rules(rule)) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            await post_chat(http, n=2)
            found = numbers(await http.get("/metrics"))
    assert found['llm_sandbox_rules_met_total{action="deny",rule="notes"}'] == 2
