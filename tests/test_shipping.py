"""The files of `deploy/` are valid, and name only files, metrics and settings that exist."""

import configparser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.available_memory import AvailableMemory
from proxy.config import Config, setting_paths
from proxy.metrics import END_REASONS, Metrics
from sandbox_runtime.pool.pool import PoolStats

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE_FILES = ("compose.yaml", "compose.bubblewrap.yaml")
DOCKERFILES = ("Dockerfile", "agent.Dockerfile", "engine.Dockerfile")
UNIT = DEPLOY / "sandbox-proxy.service"
PROGRAM = "/opt/sandbox-proxy/bin/sandbox-proxy"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def expressions(name: str) -> Iterator[str]:
    """Yield each PromQL expression of the alerts or of the dashboard."""
    if name == "alerts.yaml":
        for group in yaml.safe_load(read(name))["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    else:
        dashboard = json.loads(read(name))
        yield from (each["query"]["query"] for each in dashboard["templating"]["list"][1:])
        for panel in dashboard["panels"]:
            yield from (target["expr"] for target in panel["targets"])


def metric_names() -> set[str]:
    """Return the names of all series that the proxy serves, those of the pool included."""
    metrics = Metrics()
    metrics.register_pool_stats(lambda: PoolStats(*[0] * len(fields(PoolStats))))
    metrics.register_host_stats(list)
    metrics.register_memory(AvailableMemory())
    families = metrics.collect()
    return {f"{family.name}{end}" for family in families for end in SUFFIXES[family.type]}


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana-dashboard.json"])
def test_alert_and_dashboard_expressions_name_only_metrics_that_exist(name: str) -> None:
    named = {word for text in expressions(name) for word in re.findall(r"llm_sandbox_\w+", text)}
    assert named
    assert named - metric_names() == set()


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana-dashboard.json"])
def test_alert_and_dashboard_expressions_name_only_stop_reasons_that_exist(name: str) -> None:
    named = [re.findall(r'stop_reason="(\w+)"', text) for text in expressions(name)]
    assert {reason for reasons in named for reason in reasons} <= set(END_REASONS)


def test_grafana_panels_have_unique_ids_and_positions() -> None:
    panels = json.loads(read("grafana-dashboard.json"))["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(set(places))


# Docker


def environment_names() -> set[str]:
    """Return the names of the environment variables that hold settings."""
    return {f"LLM_SANDBOX_{'__'.join(path).upper()}" for path in setting_paths(Config)}


@pytest.mark.parametrize("name", [*COMPOSE_FILES, *DOCKERFILES, "entrypoint", UNIT.name])
def test_shipped_files_name_only_environment_variables_that_exist(name: str) -> None:
    assert set(re.findall(r"LLM_SANDBOX_\w+", read(name))) <= environment_names()


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_file_names_only_paths_and_volumes_that_exist(name: str) -> None:
    tree = yaml.safe_load(read(name))
    for service in tree["services"].values():
        if build := service.get("build"):
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in tree["volumes"] or (DEPLOY / source).is_dir()


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_file_mounts_no_host_path_into_the_proxy(name: str) -> None:
    tree = yaml.safe_load(read(name))
    proxy = tree["services"]["proxy"]
    mounted = [volume.split(":")[0] for volume in proxy["volumes"]]
    assert set(mounted) <= set(tree["volumes"])
    assert "cap_add" not in proxy
    assert proxy["ports"] == ["${LISTEN:-127.0.0.1:8080}:8080"]


def test_only_the_engine_service_of_compose_adds_capabilities_and_none_is_privileged() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"]
    for service in services.values():
        assert "privileged" not in service
        # docker-compose 1.29 refuses others, such as systempaths, when it starts the container.
        options = [option.partition(":")[0] for option in service.get("security_opt", ())]
        assert set(options) <= {"apparmor", "label", "no-new-privileges", "seccomp"}
    added = {name: service["cap_add"] for name, service in services.items() if "cap_add" in service}
    assert added == {"engine": ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE"]}


def test_docker_engine_container_gives_its_socket_to_the_group_of_the_proxy() -> None:
    command = next(words for words in instructions("engine.Dockerfile") if words[0] == "CMD")
    assert '"--group=1000",' in command
    assert "useradd --uid 1000 --user-group" in read("Dockerfile")


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_docker_compose_accepts_the_shipped_compose_file(name: str) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    done = subprocess.run(
        [program, "--file", str(DEPLOY / name), "config"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "BACKEND_URL": "http://models.example/v1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    proxy: dict[str, Any] = yaml.safe_load(done.stdout)["services"]["proxy"]
    address = proxy["environment"]["LLM_SANDBOX_BACKEND__BASE_URL"]
    assert address == "http://models.example/v1"


def instructions(name: str) -> Iterator[list[str]]:
    """Yield the words of each instruction of a Dockerfile."""
    text = re.sub(r"(?m)^#.*\n", "", read(name)).replace("\\\n", " ")
    yield from (line.split() for line in text.splitlines() if line)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_copies_only_paths_that_exist_and_that_dockerignore_includes(
    dockerfile: str,
) -> None:
    included = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        source
        for name, *words in instructions(dockerfile)
        if name == "COPY" and not words[0].startswith("--from=")
        for source in words[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in included


def test_dockerfile_has_the_base_of_the_sandbox_image_and_a_user_other_than_root() -> None:
    found = list(instructions("Dockerfile"))
    sandbox = (ROOT / "sandbox_runtime/image/Dockerfile").read_text(encoding="utf-8")
    bases = [words[1] for words in found if words[0] == "FROM"]
    assert f"FROM {bases[0]} " in sandbox
    assert set(bases[1:]) == {"base"}
    assert ["USER", "sandbox-proxy"] in found


# systemd


def test_systemd_unit_starts_only_commands_that_exist() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as configparser documents it
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    assert set(parser) == {"DEFAULT", "Unit", "Service", "Install"}
    service = parser["Service"]
    assert service["ExecStartPre"].startswith(f"{PROGRAM} config check --config ")
    assert service["ExecStart"].startswith(f"{PROGRAM} serve --config ")
    assert service["User"] == "sandbox-proxy"


def test_systemd_accepts_the_shipped_unit_file(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true")
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [program, "verify", str(copy)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert UNIT.name not in done.stderr
