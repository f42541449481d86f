"""The wheel, installed into an environment of its own, works outside of the checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.e2e.proxy_process import ROOT

PACKAGES = ("evaluation", "policies", "proxy", "sandbox_runtime", "training")
TIMEOUT_S = 120


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the checkout in its import path."""
    own = {"HATCH_BUILD_NO_HOOKS": "true", "XDG_STATE_HOME": str(cwd / "state")}
    return subprocess.run(
        list(map(str, command)),
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, with the agent that `make install` has built."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", directory)
    built = run(*pip, ROOT, cwd=directory)
    if "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("no package registry answers, and the build needs hatchling")
    assert built.returncode == 0, built.stderr
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. Its dependencies are those of this one."""
    directory = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory)
    assert made.returncode == 0, made.stderr
    python = directory / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    installed = run(*pip, cwd=directory)
    assert installed.returncode == 0, installed.stderr
    (packages,) = directory.glob("lib/python*/site-packages")
    # Editable installs of that directory are not read: only a site directory has .pth files.
    dependencies = f"{sysconfig.get_paths()['purelib']}\n"
    (packages / "dependencies.pth").write_text(dependencies, encoding="utf-8")
    return directory / "bin"


def test_wheel_contains_each_file_of_the_packages(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == files


def test_programs_import_the_installed_packages_and_not_those_of_the_checkout(
    programs: Path, tmp_path: Path
) -> None:
    ask = f"import {', '.join(PACKAGES)}; print(*(m.__path__[0] for m in ({', '.join(PACKAGES)})))"
    done = run(programs / "python", "-c", ask, cwd=tmp_path)
    assert done.stderr == ""
    assert all(Path(path).is_relative_to(programs.parent) for path in done.stdout.split())


def test_installed_command_prints_its_version(programs: Path, tmp_path: Path) -> None:
    done = run(programs / "sandbox-proxy", "--version", cwd=tmp_path)
    expected = f"sandbox-proxy {version('llm-sandbox-proxy')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_installed_command_answers_the_demo(programs: Path, tmp_path: Path) -> None:
    done = run(programs / "sandbox-proxy", "demo", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "There are 78,498 primes up to 1,000,000" in done.stdout
    files = {path.name for path in (tmp_path / "demo-output").iterdir()}
    assert files == {"primes.csv", "primes.svg"}
