"""Builds of the image, which must contain no leftovers of the build."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy.__main__ import main
from sandbox_runtime.images import BUILD, build_image
from tests.sandbox_runtime.image.containers import container
from tests.sandbox_runtime.transfer import PLENTY_S, output

SIGNER = "llm-sandbox-proxy/test-signer:latest"
PROJECT = "from setuptools import setup\nsetup(name='found', py_modules=['found'])\n"


@pytest.mark.docker
def test_image_has_user_root_and_working_directory_testbed_and_no_proxy_settings(
    client: Any, slim: str
) -> None:
    config = client.inspect_image(slim)["Config"]
    assert (config["User"], config["WorkingDir"]) == ("", "/testbed")
    assert {entry.partition("=")[0] for entry in config["Env"]} == {
        "LANG",
        "PATH",
        "PIP_BREAK_SYSTEM_PACKAGES",
        "PIP_ROOT_USER_ACTION",
    }


@pytest.mark.docker
async def test_build_leaves_no_package_files_or_lists(slim: str, tmp_path: Path) -> None:
    find = "find /var/lib/apt/lists /var/cache/apt /usr/local/share/ca-certificates -type f"
    async with container(slim, tmp_path) as sandbox:
        assert await output(sandbox, f"{find} ! -name lock") == ""


@pytest.mark.docker
async def test_pip_installs_for_the_whole_system(slim: str, tmp_path: Path) -> None:
    install = "pip install --quiet --no-index --no-build-isolation /tmp/project"
    async with container(slim, tmp_path) as sandbox:
        await output(sandbox, f'mkdir /tmp/project; echo "{PROJECT}" > /tmp/project/setup.py')
        await output(sandbox, "echo 'answer = 42' > /tmp/project/found.py")
        refused = await sandbox.exec(
            f"env -u PIP_BREAK_SYSTEM_PACKAGES {install}", timeout_s=PLENTY_S
        )
        assert "externally-managed-environment" in refused.stderr
        installed = await sandbox.exec(install, timeout_s=PLENTY_S)
        assert (installed.exit_code, installed.stderr) == (0, "")
        found = await output(sandbox, "cd /; python3 -c 'import found; print(found.answer)'")
        assert found == "42\n"


@pytest.mark.docker
async def test_certificates_given_to_the_build_are_trusted(
    client: Any, slim: str, tmp_path: Path
) -> None:
    make = (
        "for name in one two; do openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256"
        " -nodes -days 2 -subj /CN=$name -keyout /dev/null 2>/dev/null; done"
    )
    verify = "csplit -s - /BEGIN/ '{*}' && openssl verify xx01 xx02"
    async with container(slim, tmp_path) as sandbox:
        pem = await output(sandbox, make)
        refused = await sandbox.exec(verify, timeout_s=PLENTY_S, stdin=pem.encode())
        assert "xx02: verification failed" in refused.stderr
    try:
        build = ["build-image", "--target=slim", f"--tag={SIGNER}"]
        assert main([*build, f"--build-arg=CA_CERTIFICATES={pem}"]) == 0
        async with container(SIGNER, tmp_path) as sandbox:
            trusted = await sandbox.exec(verify, timeout_s=PLENTY_S, stdin=pem.encode())
            assert (trusted.exit_code, trusted.stdout) == (0, "xx01: OK\nxx02: OK\n")
    finally:
        client.remove_image(SIGNER)


def test_build_without_an_engine_fails_at_once_with_the_reason() -> None:
    done = subprocess.run(
        ["sh", BUILD, "slim", "never/built:latest"],
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "DOCKER_HOST": "tcp://127.0.0.1:1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert b"127.0.0.1:1" in done.stderr


@pytest.mark.docker
@pytest.mark.usefixtures("slim")
def test_build_fails_when_docker_refuses_the_tag() -> None:
    assert build_image("slim", "not a tag", "--quiet") != 0
