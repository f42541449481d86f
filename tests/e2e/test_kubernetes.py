"""The commands with sandboxes in Pods: from an empty namespace to a first answer, and back."""

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import answer_text, http_client, post_chat
from tests.e2e.proxy_process import environment, run, serving, write_config
from tests.e2e.test_command import packages_loaded_by
from tests.fakes.backend import scripted_backend
from tests.sandbox_runtime.backends.cluster import (
    AGENT_IMAGE,
    NAMESPACE,
    TEST_IMAGE,
    ClusterAdmin,
    kubeconfig,
)

EMPTIED, SWEPT = "llm-sandboxes-emptied", "llm-sandboxes-swept"
"""Namespaces of one test each, which no other test may disturb."""
NOWHERE = "http://127.0.0.1:1/v1"
UNREACHABLE = """
apiVersion: v1
kind: Config
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: nobody, user: {}}]
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
current-context: nowhere
"""
"""The kubeconfig of an API server that does not answer."""
WITHOUT_THE_EXTRA = """
import sys
sys.modules["kubernetes_asyncio"] = None  # as if it were not installed
from proxy.__main__ import main
sys.exit(main(["gc", "--sandbox", "kubernetes"]))
"""


@pytest.fixture
async def admin() -> AsyncIterator[ClusterAdmin]:
    async with ClusterAdmin() as made:
        for namespace in (NAMESPACE, EMPTIED, SWEPT):
            await made.apply("sandboxes.yaml", namespace)
        yield made


def settings(**changes: Any) -> dict[str, Any]:
    cluster = {
        "namespace": NAMESPACE,
        "kubeconfig": str(kubeconfig()),
        "image": TEST_IMAGE,
        "agent_image": AGENT_IMAGE,
        "allow_unenforced_network_policy": True,
        **changes,
    }
    return {
        "sandbox": {"backend": "kubernetes", "kubernetes": cluster, "pool": {"min_ready": 1}},
        "isolation": {"memory_mib": 256, "cpus": 0.5},
    }


@pytest.mark.cluster
async def test_answer_is_computed_in_a_pod_and_no_pod_is_left_when_the_server_ends(
    admin: ClusterAdmin, tmp_path: Path
) -> None:
    command = call("execute_bash", command="echo $((6 * 7)) in $(cat /proc/sys/kernel/hostname)")
    script = [tool_reply(command), text_reply("42, computed in a Pod.")]
    async with (
        scripted_backend(script) as backend,
        serving(tmp_path, "kubernetes", backend.base_url, settings(namespace=EMPTIED)) as server,
        http_client(server.url) as http,
    ):
        answer = await post_chat(http, {})
        assert answer_text(answer) == "42, computed in a Pod."
        (result,) = [m for m in backend.requests[-1].body["messages"] if m["role"] == "tool"]
        assert "42 in sandbox" in str(result["content"])
        assert "sandboxes: kubernetes" in server.log
        assert "kubernetes: not isolated, see `doctor`: " in server.log
        server.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            await server.ended()
    pods = await admin.pods(EMPTIED)
    assert [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]] == []


@pytest.mark.cluster
async def test_serve_refuses_a_cluster_that_enforces_no_network_policy(
    admin: ClusterAdmin, tmp_path: Path
) -> None:
    config = write_config(tmp_path, settings(allow_unenforced_network_policy=False))
    ended = await run(tmp_path, "serve", "--config", config, "--backend-url", NOWHERE)
    assert ended.returncode == 1
    assert b"no enforced network policy keeps a sandbox from" in ended.stderr
    assert b"sandbox.kubernetes.allow_unenforced_network_policy" in ended.stderr


@pytest.mark.cluster
async def test_doctor_reports_the_isolation_of_the_cluster(
    admin: ClusterAdmin, tmp_path: Path
) -> None:
    config = write_config(tmp_path, settings())
    ended = await run(tmp_path, "doctor", "--config", config, "--backend-url", NOWHERE)
    lines = ended.stdout.decode().splitlines()

    def line(name: str) -> str:
        (found,) = [each for each in lines if f"  {name}: " in each]
        return found

    assert line("kubernetes api").startswith("ok ")
    assert line("kubernetes permissions").startswith("ok ")
    assert "(accepted by the configuration)" in line("kubernetes network")
    assert "podPidsLimit" in line("kubernetes limits")
    assert "SHARE THE NODE'S KERNEL" in line("kubernetes runtime")
    assert "ACCEPTED" in line("network: public_networks")
    assert line("kubernetes sandbox").startswith("ok    kubernetes sandbox: 42 0 Linux")
    assert line("files") == "ok    files: 1048576 bytes in and out"
    assert [each for each in lines if each.startswith("FAIL")] == [line("model backend")]


@pytest.mark.cluster
async def test_cluster_smoke_command_checks_the_cluster_without_a_model(
    admin: ClusterAdmin, tmp_path: Path
) -> None:
    ended = await run(
        tmp_path, "cluster", "smoke", "--config", write_config(tmp_path, settings()), timeout_s=300
    )
    lines = ended.stdout.decode().splitlines()
    assert ended.returncode == 0, ended.stdout.decode()
    assert "ok    files: 1048576 bytes in and out" in lines
    assert any(line.startswith("ok    kubernetes sandbox: 42 0 Linux") for line in lines)
    assert not any("model backend" in line for line in lines)
    assert lines[-1] == "The cluster works."


async def test_cluster_smoke_command_fails_without_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_asyncio")
    config = tmp_path / "kubeconfig"
    config.write_text(UNREACHABLE)
    tree = {"sandbox": {"kubernetes": {"kubeconfig": str(config), "image": "sandbox"}}}
    ended = await run(tmp_path, "cluster", "smoke", "--config", write_config(tmp_path, tree))
    lines = ended.stdout.decode().splitlines()
    assert ended.returncode == 1
    assert any(line.startswith("FAIL  kubernetes") for line in lines)
    assert lines[-1] == "The cluster cannot run sandboxes: correct the lines marked FAIL."


@pytest.mark.cluster
async def test_gc_reports_the_number_of_removed_pods(admin: ClusterAdmin, tmp_path: Path) -> None:
    config = write_config(tmp_path, settings(namespace=SWEPT))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "sandbox-0000000000000000-1",
            "namespace": SWEPT,
            "labels": {
                "app.kubernetes.io/managed-by": "llm-sandbox-proxy",
                "llm-sandbox-proxy/owner": "0000000000000000",
            },
        },
        "spec": {
            "containers": [
                {
                    "name": "sandbox",
                    "image": TEST_IMAGE,
                    "resources": {
                        "limits": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "8Mi"}
                    },
                }
            ]
        },
    }
    await admin.apply_object(pod)
    ended = await run(tmp_path, "gc", "--config", config)
    assert (ended.returncode, ended.stdout) == (0, b"ok    kubernetes: 1 removed\n")


async def test_kubernetes_client_package_is_imported_only_for_the_kubernetes_backend(
    tmp_path: Path,
) -> None:
    build = "from proxy.bootstrap import build_backend; from proxy.config import parse;"
    tree = "parse({'sandbox': {'backend': '%s'}}, 'test')"
    for kind, is_loaded in (("bubblewrap", False), ("kubernetes", True)):
        loaded = await packages_loaded_by(f"{build} build_backend({tree % kind})", tmp_path)
        assert ("kubernetes_asyncio" in loaded) is is_loaded


async def test_error_names_the_kubernetes_extra_if_it_is_not_installed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_THE_EXTRA, encoding="utf-8")
    ended = await anyio.run_process(
        [sys.executable, str(program)], check=False, cwd=tmp_path, env=environment(tmp_path)
    )
    assert b"llm-sandbox-proxy[kubernetes]" in ended.stdout


async def test_sandbox_inputs_directory_is_refused_for_kubernetes(tmp_path: Path) -> None:
    tree = {"sandbox": {"backend": "kubernetes", "inputs": str(tmp_path)}}
    ended = await run(tmp_path, "gc", "--config", write_config(tmp_path, tree))
    assert ended.returncode == 1
    assert b"sandbox.inputs: the nodes of a cluster do not have" in ended.stderr
