"""Checks of the model backend and of the sandboxes: for the start of `serve`, and for the command
`doctor`. Also the command `gc`."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from socket import socket

from policies.egress import Egress
from policies.isolation import Isolation
from proxy.agent.context_windows import ContextWindows
from proxy.agent.model import Model
from proxy.errors import BackendError
from proxy.models.tool_support import ToolProbe, ToolSupportSettings
from sandbox_runtime.backends.base import Backend, Check
from sandbox_runtime.backends.docker_hosts import DockerHost, DockerHosts
from sandbox_runtime.errors import SandboxError, SandboxFileError, SandboxStartError
from sandbox_runtime.escape.context import EscapeFinding
from sandbox_runtime.escape.run import accept, refusal_reason, run_batch, run_probes, why_none_tried
from sandbox_runtime.escape.run import self_test as run_self_test
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.images import REQUIRED, image_checks, installed_programs, terminal_check
from sandbox_runtime.sandbox import Sandbox

log = logging.getLogger(__name__)

CLIENT_KEY_REQUIRED = "it requires the client's own key"
"""The `refusal_reason` of `check_model` with `backend.forward_client_key`. That check sends no key,
so it passes even if the backend refuses it."""
MAX_PROBED_MODELS = 20
"""Maximum number of models whose tool support is probed."""
FILE_BYTES = 1 << 20
"""Size of the file that is written into a sandbox and read back."""
PROBE_S = 60.0
"""Timeout of the probe of one model, in seconds."""
_WORKS, _OPTIONAL, _BROKEN = "Works:", "Not available, and not required:", "To correct first:"
_MARKS = {_WORKS: "ok  ", _OPTIONAL: "--  ", _BROKEN: "FAIL"}
"""The mark of each line, by the title of its group."""


async def check_model(
    model: Model, refusal_reason: str, windows: ContextWindows | None = None
) -> Check:
    """Check that the model backend answers. `refusal_reason` is the reason to report if the backend
    refuses the key, and says where the key comes from. `windows` records the context windows that
    the backend lists."""
    try:
        served = await model.models()
    except BackendError as error:
        if error.status not in (401, 403):
            return Check("model backend", False, str(error))
        return Check(
            "model backend", refusal_reason == CLIENT_KEY_REQUIRED, f"{refusal_reason} ({error})"
        )
    if windows is not None:
        windows.record_listing(served)
    names = ", ".join(str(entry.get("id")) for entry in served[:5]) or "no models"
    return Check("model backend", True, names)


async def check_tools(probe: ToolProbe, settings: ToolSupportSettings) -> list[Check]:
    """Check for each of the first MAX_PROBED_MODELS models of the backend whether the model gets
    tools. Return no checks if the backend does not list its models."""
    try:
        names = (await probe.models())[:MAX_PROBED_MODELS]
        version = await probe.engine_version() if names else None
    except BackendError:
        return []  # `check_model` has reported the error
    return [await _check_model_tools(probe, settings, name, version) for name in names]


async def _check_model_tools(
    probe: ToolProbe, settings: ToolSupportSettings, name: str, version: str | None
) -> Check:
    title = f"tools of {name}"
    if (setting := settings.for_model(name)) != "probe":
        return Check(title, setting == "always", f"tool_support: {setting}")
    try:
        async with asyncio.timeout(PROBE_S):
            verdict = await probe.verdict(name, version)
    except (BackendError, TimeoutError) as error:
        return Check(title, False, f"unknown: {error or 'no answer in time'}")
    if verdict is None:
        return Check(title, True, "unknown, so the model gets tools")
    return Check(title, not verdict.reason, verdict.message or "supported")


def log_startup_summary(
    listener: socket,
    backend_name: str,
    model_check: Check,
    network: Egress,
    profile_networks: Mapping[str, Egress],
) -> None:
    """Log the sandbox backend, the network of the sandboxes, the model backend and the address of
    the server. `profile_networks` are the networks of the profiles that keys and models use, by
    name."""
    log.info("sandboxes: %s; network: %s", backend_name, _describe_network(network))
    for name, other in profile_networks.items():
        if other != network:
            log.info("network in profile %s: %s", name, _describe_network(other))
    if model_check.ok:
        log.info("model backend: %s", model_check.detail)
    else:
        log.warning("the model backend does not answer: %s", model_check.detail)
    host, port = listener.getsockname()[:2]
    log.info("serving at http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)


def _describe_network(network: Egress) -> str:
    if network.mode == "allowlist":
        return f"allowlist ({', '.join(network.allowed_hosts) or 'no hosts'})"
    return {"none": "none", "open": "all public hosts"}[network.mode]


async def require_working_backend(
    backend: Backend, isolation: Isolation, *, self_test: bool
) -> tuple[str, ...]:
    """Check that the sandbox backend works and, with `self_test`, that no known escape from a
    sandbox succeeds. Return the programs that are installed in its sandboxes. Of several Docker
    engines at least one must pass; the others are checked before they get sandboxes.

    Raises SandboxStartError, after closing the backend.
    """
    try:
        if not isinstance(backend, DockerHosts):
            return await _require_passing_checks(backend, isolation, self_test=self_test)
        programs: dict[Backend, tuple[str, ...]] = {}

        async def admit(engine: Backend) -> None:
            programs[engine] = await _require_passing_checks(engine, isolation, self_test=self_test)

        await backend.open(admit)
        first, *others = programs.values()
        return tuple(name for name in first if all(name in each for each in others))
    except SandboxError as error:
        await backend.aclose()
        raise SandboxStartError(str(error)) from error


async def _require_passing_checks(
    backend: Backend, isolation: Isolation, *, self_test: bool
) -> tuple[str, ...]:
    if broken := [check for check in await backend.check() if not check.ok]:
        raise SandboxStartError("; ".join(f"{each.name}: {each.detail}" for each in broken))
    sandbox = await start_sandbox(backend, isolation)
    try:
        if self_test:
            _require_isolation(backend, await run_batch(sandbox))
        return await installed_programs(sandbox)
    finally:
        await sandbox.close()


def _require_isolation(backend: Backend, findings: Sequence[EscapeFinding]) -> None:
    findings = [accept(finding, backend.accepted_escapes) for finding in findings]
    if why := refusal_reason(findings):
        raise SandboxStartError(f"{backend.name}: {why}")
    if why := why_none_tried(findings):
        log.warning("%s: %s", backend.name, why)
    if names := [finding.probe for finding in findings if finding.verdict == "accepted"]:
        log.warning("%s: not isolated, see `doctor`: %s", backend.name, ", ".join(names))


async def diagnose(
    model: Model,
    refusal_reason: str,
    probe: ToolProbe | None,
    tool_support_settings: ToolSupportSettings,
    builders: Mapping[str, Callable[[], Backend]],
    isolation: Isolation,
    *,
    self_test: bool,
) -> int:
    """Make all checks. Print the results, grouped, with the failed checks that `serve` requires
    last. Then print whether `serve` would work. Return the exit code: 1 if a check failed that
    `serve` requires, else 0.

    For `refusal_reason`, see `check_model`. `builders` are the sandbox backends in order of
    preference: `serve` uses the first that can be built. With `self_test`, slow escape attempts are
    made too."""
    report = _Report()
    report.add([await check_model(model, refusal_reason)], needed=True)
    tools = [] if probe is None else await check_tools(probe, tool_support_settings)
    report.add(tools, needed=False)
    await model.aclose()
    chosen = ""
    for name, build in builders.items():
        found_here = await _backend_checks(name, build, isolation, self_test=self_test)
        needed = not chosen and (found_here.was_built or name == list(builders)[-1])
        chosen = name if needed and found_here.was_built else chosen
        report.add(found_here.checks, needed=needed)
        report.add(found_here.unused, needed=False)
    report.add([Check("sandboxes", bool(chosen), chosen or "none")], needed=True)
    report.write()
    sys.stdout.write(f"{_summary_line(report.failed_checks)}\n")
    if tools and not any(check.ok for check in tools):
        sys.stdout.write(
            "None of the tested models is known to support tools, which a sandbox needs.\n"
        )
    return 1 if report.failed_checks else 0


async def smoke_test_cluster(
    build: Callable[[], Backend], isolation: Isolation, *, self_test: bool
) -> int:
    """Check a cluster and print the results as `diagnose` does, then whether the cluster can run
    sandboxes. Return the exit code: 1 if a required check failed, else 0. No model backend is
    needed. With `self_test`, slow escape attempts are made too."""
    report = _Report()
    found = await _backend_checks("kubernetes", build, isolation, self_test=self_test)
    report.add(found.checks, needed=True)
    report.write()
    verdict = (
        "cannot run sandboxes: correct the lines marked FAIL" if report.failed_checks else "works"
    )
    sys.stdout.write(f"The cluster {verdict}.\n")
    return 1 if report.failed_checks else 0


class _Report:
    """Checks, grouped by result."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Check]] = {title: [] for title in _MARKS}

    def add(self, checks: Iterable[Check], *, needed: bool) -> None:
        """Add checks. `needed` is True if `serve` requires that they pass."""
        for check in checks:
            is_needed = needed and not _is_optional_program(check)
            group = _WORKS if check.ok else _BROKEN if is_needed else _OPTIONAL
            self._groups[group].append(check)

    def write(self) -> None:
        """Print the groups. Failed checks that `serve` requires come last."""
        for title, checks in self._groups.items():
            if checks:
                sys.stdout.write(f"{title}\n")
                sys.stdout.writelines(
                    f"{_MARKS[title]}  {each.name}: {each.detail}\n" for each in checks
                )

    @property
    def failed_checks(self) -> list[str]:
        """The names of the failed checks that `serve` requires."""
        return [check.name for check in self._groups[_BROKEN]]


def _summary_line(failed_checks: Sequence[str]) -> str:
    if not failed_checks:
        return "`sandbox-proxy serve` would work."
    if failed_checks == ["model backend"]:
        return "`sandbox-proxy serve` would start, but no request can be answered yet."
    return "`sandbox-proxy serve` would not work: correct the lines marked FAIL."


def _is_optional_program(check: Check) -> bool:
    """Return True if the check is about a program of the image that sandboxes do not require."""
    return check.name.startswith("image ") and check.name not in REQUIRED


@dataclass(frozen=True, slots=True)
class _BackendChecks:
    """The checks of one sandbox backend."""

    checks: Sequence[Check]
    was_built: bool = True
    unused: Sequence[Check] = ()
    """The checks of engines that fail a check. `serve` starts without these engines if another
    engine passes all checks."""


async def _backend_checks(
    name: str, build: Callable[[], Backend], isolation: Isolation, *, self_test: bool
) -> _BackendChecks:
    try:
        backend = build()
    except SandboxStartError as error:
        return _BackendChecks([Check(name, False, str(error))], was_built=False)
    try:
        if not isinstance(backend, DockerHosts):
            return _BackendChecks(await _all_checks(backend, isolation, self_test=self_test))
        by_host = [
            await _host_checks(host, isolation, self_test=self_test) for host in backend.hosts
        ]
    finally:
        await backend.aclose()
    used: list[Check] = []
    unused: list[Check] = []
    for checks in by_host:
        passes = all(check.ok or _is_optional_program(check) for check in checks)
        (used if passes else unused).extend(checks)
    return _BackendChecks(used, unused=unused) if used else _BackendChecks(unused)


async def _host_checks(host: DockerHost, isolation: Isolation, *, self_test: bool) -> list[Check]:
    try:
        checks = await _all_checks(await host.open(), isolation, self_test=self_test)
    except SandboxStartError as error:
        checks = [Check("docker engine", False, str(error))]
    return [replace(check, detail=f"{host.url}: {check.detail}") for check in checks]


async def _all_checks(backend: Backend, isolation: Isolation, *, self_test: bool) -> list[Check]:
    checks = await backend.check()
    if all(check.ok for check in checks):
        checks += await _sandbox_checks(backend, isolation)
        checks += await _escape_checks(backend, isolation, self_test=self_test)
    return checks


async def _escape_checks(backend: Backend, isolation: Isolation, *, self_test: bool) -> list[Check]:
    """Return the results of attempts to escape: with `self_test` all results, else a summary and
    the attempts that the sandbox did not withstand."""
    start = partial(start_sandbox, backend)
    try:
        if self_test:
            findings: list[EscapeFinding] = []
            await run_self_test(start, isolation, findings.append)
            return [accept(each, backend.accepted_escapes).to_check() for each in findings]
        findings = [
            accept(each, backend.accepted_escapes) for each in await run_probes(start, isolation)
        ]
    except SandboxError as error:
        return [Check(f"{backend.name} isolation", False, str(error))]
    held = sum(finding.verdict == "held" for finding in findings)
    others = [finding.to_check() for finding in findings if finding.verdict != "held"]
    is_ok = all(check.ok for check in others)
    return [Check(f"{backend.name} isolation", is_ok, f"{held} of {len(findings)} held"), *others]


async def _sandbox_checks(backend: Backend, isolation: Isolation) -> list[Check]:
    """Start a sandbox and run a command in it. Return the checks of the sandbox and of the programs
    in its image."""
    try:
        sandbox = await start_sandbox(backend, isolation)
        try:
            result = await sandbox.exec("echo $((6 * 7)); id -u; uname -sr", timeout_s=10)
            files = await _file_check(sandbox)
            image = await image_checks(sandbox)
            terminals = await terminal_check(sandbox)
        finally:
            await sandbox.close()
    except SandboxError as error:
        return [Check(f"{backend.name} sandbox", False, str(error))]
    works = result.stdout.startswith("42\n")
    output = " ".join((result.stdout + result.stderr).split())
    return [Check(f"{backend.name} sandbox", works, output), files, terminals, *image]


async def _file_check(sandbox: Sandbox) -> Check:
    """Write a file into a sandbox and read it back. Raises SandboxLostError."""
    content, received = os.urandom(FILE_BYTES), bytearray()

    async def source() -> AsyncIterator[bytes]:
        yield content

    async def sink(piece: bytes) -> None:
        received.extend(piece)

    try:
        await sandbox.put("/tmp/doctor", source())
        await sandbox.get("/tmp/doctor", sink, max_bytes=FILE_BYTES)
    except SandboxFileError as error:
        return Check("files", False, str(error))
    same = received == content
    detail = f"{FILE_BYTES} bytes in and out" if same else "a file came back with other content"
    return Check("files", same, detail)


async def collect_garbage(builders: Mapping[str, Callable[[], Backend]]) -> int:
    """Remove the sandboxes of crashed proxies and print their number for each backend. Return 0."""
    for name, build in builders.items():
        try:
            backend = build()
        except SandboxStartError as error:
            sys.stdout.write(f"--    {name}: {error}\n")
            continue
        removed = await backend.sweep()
        await backend.aclose()
        sys.stdout.write(f"ok    {name}: {removed} removed\n")
    return 0
