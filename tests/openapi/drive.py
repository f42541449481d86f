"""Run schemathesis with OpenAI's description against a real server with in-memory sandboxes.

Run it manually with any number of examples:

python -m tests.openapi.drive --max-examples 1000 --seed 7
python -m tests.openapi.drive streams --max-examples 1000 --seed 7
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import anyio
import httpx

from proxy.models.scripted import text_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy, single_key
from tests.openapi.description import BASE_PATH, Tree, amended, cut, streamed
from tests.openapi.strict_backend import ANSWER, strict

KEY = "sk-described"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
ANSWER_TIMEOUT_S = 60
"""Time limit for one answer, in seconds."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    "use_after_free",
)
"""All checks of schemathesis except four.

`positive_data_acceptance`: many requests that the description allows reference something that does
not exist, such as a file or an item (see `Outcome.accepted`). `ensure_resource_availability`: the
check takes a missing file of a container for a missing container. `missing_required_header`: no
header is required. `object_level_authorization`: the check needs two keys.
"""

OWN_CHECKS = CHECKS[:5]
"""Checks for this server's own description, which is less strict than its request validation."""


@dataclass(frozen=True)
class Outcome:
    """The result of a schemathesis run."""

    passed: bool
    output: str
    """The output of schemathesis."""
    report: Mapping[str, Any]

    @property
    def cases(self) -> int:
        """The number of generated requests."""
        return int(self.report["test_cases"]["generated"])

    def accepted(self, operation: str) -> float:
        """Return the share of valid requests of an operation that were answered with success."""
        phases = self.report["valid_rates"][operation].values()
        good = sum(phase["accepted"] for phase in phases)
        return good / max(1, sum(sum(phase.values()) for phase in phases))


async def drive(directory: Path, *options: str) -> Outcome:
    """Run schemathesis with valid and invalid requests; all files are written to `directory`."""
    return await _drive(directory, lambda description: description, options)


async def drive_streams(directory: Path, *options: str) -> Outcome:
    """Run schemathesis with valid requests for streamed answers.

    Invalid requests are left out: the backend may refuse them inside a stream with status 200.
    """
    return await _drive(directory, streamed, ("--mode", "positive", *options))


async def drive_own(directory: Path, *options: str) -> Outcome:
    """Run schemathesis on this server's own description, with valid and invalid requests."""
    async with (
        scripted_backend(lambda body: text_reply(ANSWER)) as backend,
        running_proxy(backend, "memory", directory / "state", keyring=single_key(KEY)) as url,
    ):
        async with httpx.AsyncClient() as client:
            description = await client.get(f"{url}/openapi.json")
        (directory / "description.json").write_text(description.text, encoding="utf-8")
        own = ("--phases", "fuzzing", *options)
        return await _ask(directory, url, own, OWN_CHECKS)


async def _drive(directory: Path, part: Callable[[Tree], Tree], options: Sequence[str]) -> Outcome:
    description = amended()
    keyring = single_key(KEY)
    async with (
        scripted_backend(strict(description)) as backend,
        running_proxy(backend, "memory", directory / "state", keyring=keyring) as url,
    ):
        async with httpx.AsyncClient(headers=WITH_KEY) as client:
            able = (await client.get(f"{url}/v1/capabilities")).json()
        description = part(cut(description, able["endpoints"]))
        (directory / "description.json").write_text(json.dumps(description), encoding="utf-8")
        return await _ask(directory, url + BASE_PATH, options)


async def _ask(
    directory: Path, url: str, options: Sequence[str], checks: Sequence[str] = CHECKS
) -> Outcome:
    report = directory / "report.json"
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color"),
        *("run", "description.json", "--url", url, "--header", f"Authorization: Bearer {KEY}"),
        *("--checks", ",".join(checks), "--continue-on-failure"),
        *("--request-timeout", str(ANSWER_TIMEOUT_S), "--suppress-health-check", "all"),
        *("--report", "json", "--report-json-path", str(report)),
        *options,
    ]
    done = await anyio.run_process(
        command, cwd=directory, stdin=DEVNULL, stderr=STDOUT, check=False
    )
    output = done.stdout.decode(errors="replace")
    return Outcome(done.returncode == 0, output, json.loads(report.read_text(encoding="utf-8")))


async def _by_hand(options: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        if options[:1] == ["streams"]:
            outcome = await drive_streams(Path(directory), *options[1:])
        else:
            outcome = await drive(Path(directory), *options)
    rates = (f"{outcome.accepted(each):4.0%} {each}" for each in outcome.report["valid_rates"])
    sys.stdout.write("\n".join([outcome.output, *rates, ""]))
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_by_hand(sys.argv[1:])))
