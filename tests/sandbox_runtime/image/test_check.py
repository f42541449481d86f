"""The image check reports each missing program or library in one line."""

from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from sandbox_runtime.backends.base import Check
from sandbox_runtime.images import FILES, MODULES, PROGRAMS, REQUIRED, TESTED_PROGRAMS, image_checks
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.image.containers import container
from tests.sandbox_runtime.transfer import PLENTY_S, output

EVERYTHING = {*PROGRAMS, *MODULES, *FILES, *TESTED_PROGRAMS}
NO_BASH = "llm-sandbox-proxy/test-no-bash:latest"
IN_SLIM = {
    *("bash", "certificates", "curl", "git", "ls", "pip", "ps", "python", "python3", "stat"),
    *("tar", "unzip"),
}


@pytest.fixture
async def sandbox(slim: str, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox of the small image with root inside, so that tests can remove programs."""
    async with container(slim, tmp_path) as opened:
        yield opened


def lacking(checks: list[Check]) -> set[str]:
    return {check.name.removeprefix("image ") for check in checks if not check.ok}


def there(checks: list[Check]) -> set[str]:
    (summary,) = (check.detail for check in checks if check.ok)
    return set(summary.removeprefix("has ").split(", "))


@pytest.mark.docker
async def test_image_check_of_the_slim_image_finds_programs_and_reports_missing_libraries(
    sandbox: Sandbox,
) -> None:
    checks = await image_checks(sandbox)
    assert there(checks) == IN_SLIM
    assert lacking(checks) == EVERYTHING - IN_SLIM
    assert Check("image numpy", False, "missing: no arrays") in checks
    assert REQUIRED.isdisjoint(check.name for check in checks if not check.ok)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("name", "removal"),
    [
        ("git", 'rm "$(command -v git)"'),
        ("tar", 'rm "$(command -v tar)"'),
        ("python", 'rm "$(command -v python)"'),
        ("python3", 'rm "$(command -v python3)"'),
        ("pip", "rm -r /usr/lib/python3/dist-packages/pip"),
        ("certificates", "rm /etc/ssl/certs/ca-certificates.crt"),
    ],
)
async def test_removed_programs_and_libraries_are_reported(
    sandbox: Sandbox, name: str, removal: str
) -> None:
    before = await image_checks(sandbox)
    await output(sandbox, removal)
    after = await image_checks(sandbox)
    gone = {"python3", "python", "pip"} if name == "python3" else {name}
    assert there(before) - there(after) == gone
    assert lacking(after) - lacking(before) == gone


@pytest.mark.docker
@pytest.mark.parametrize(
    ("name", "making"),
    [
        ("numpy", "cd /usr/lib/python3/dist-packages && echo > numpy.py"),
        ("fonts", "mkdir -p /usr/share/fonts/truetype && echo > /usr/share/fonts/truetype/a.ttf"),
        ("gcc", "cd /usr/bin && echo > gcc && chmod +x gcc"),
    ],
)
async def test_image_check_finds_added_programs_and_libraries(
    sandbox: Sandbox, name: str, making: str
) -> None:
    await output(sandbox, making)
    assert there(await image_checks(sandbox)) == {*IN_SLIM, name}


@pytest.mark.docker
async def test_failing_programs_are_reported_with_a_remedy(sandbox: Sandbox) -> None:
    refused = "#!/bin/sh\necho \"$0: cannot access '/': Invalid argument\" >&2; exit 2\n"
    for name in ("ls", "stat"):
        await output(sandbox, f"cat > /usr/bin/{name} <<'END'\n{refused}END")
    bad = [check for check in await image_checks(sandbox) if check.detail.startswith("fails")]
    assert [check.name for check in bad] == ["image ls", "image stat"]
    assert all("newer" in check.detail and not check.ok for check in bad)


@pytest.mark.docker
async def test_shell_state_does_not_change_the_image_check(sandbox: Sandbox) -> None:
    before = await image_checks(sandbox)
    await output(sandbox, "export PATH=/nowhere; gcc() { :; }")
    assert await image_checks(sandbox) == before


@pytest.mark.docker
async def test_failing_shell_is_reported_as_one_failed_check_with_escaped_text(
    sandbox: Sandbox,
) -> None:
    broken = "#!/usr/bin/python3\nimport sys\nsys.exit('\\x1b]0;broken\\x07')\n"
    await output(sandbox, f"cat > /tmp/bash <<'END'\n{broken}END\nchmod +x /tmp/bash")
    await sandbox.exec('mv /tmp/bash "$(command -v bash)"', timeout_s=PLENTY_S)
    (check,) = await image_checks(sandbox)
    assert (check.name, check.ok) == ("image", False)
    assert check.name in REQUIRED
    assert "broken" in check.detail
    assert check.detail.isprintable()


@pytest.mark.docker
async def test_image_without_bash_is_checked_too(client: Any, slim: str, tmp_path: Path) -> None:
    recipe = f"FROM {slim}\nRUN rm /usr/bin/bash\n".encode()
    for _ in client.build(fileobj=BytesIO(recipe), tag=NO_BASH, rm=True):
        pass
    try:
        async with container(NO_BASH, tmp_path) as sandbox:
            checks = await image_checks(sandbox)
    finally:
        # Forced: the engine may still be removing the container.
        client.remove_image(NO_BASH, force=True)
    assert there(checks) == IN_SLIM - {"bash"}
    assert {check.name for check in checks if not check.ok} & REQUIRED == {"image bash"}


async def test_image_check_of_a_bubblewrap_sandbox_reports_the_programs_of_the_host(
    tmp_path: Path,
) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        checks = await image_checks(sandbox)
    assert {"bash", "python3", "tar"} <= there(checks)
    assert there(checks) | lacking(checks) == EVERYTHING
