"""A sandbox in a Pod is adopted by another backend, as if its own process were dead."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.kubernetes import KubernetesBackend
from sandbox_runtime.backends.kubernetes_pod import OWNER_LABEL
from sandbox_runtime.errors import SandboxGoneError, SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox, adopt_sandbox, start_sandbox
from sandbox_runtime.sandbox import OutputCap, SandboxReference
from tests.fakes.kubernetes_cluster import FakeCluster, backend_of, fake_cluster
from tests.fakes.waiting import until
from tests.sandbox_runtime.transfer import PLENTY_S, output, read, write

SMALL = Isolation(memory_mib=128, cpus=0.1)
PATIENCE_S = 60


class Processes:
    """The backends of several processes in one cluster, and a sandbox of the first one."""

    def __init__(
        self, cluster: FakeCluster, backends: list[KubernetesBackend], sandbox: GuestSandbox
    ) -> None:
        self.cluster = cluster
        self.backends = backends
        self.sandbox = sandbox

    def reference(self, sandbox: GuestSandbox | None = None) -> SandboxReference:
        """Return a sandbox's reference, as it comes out of a database."""
        found = (sandbox or self.sandbox).reference()
        assert found is not None
        loaded: dict[str, Any] = json.loads(json.dumps(found))
        return loaded


@asynccontextmanager
async def processes(directory: Path, **settings: Any) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(fake_cluster())
        backends = []
        for name in ("one", "two", "three"):
            (directory / name).mkdir()
            backend = backend_of(cluster, directory / name, **settings)
            backends.append(await opened.enter_async_context(backend))
        with anyio.fail_after(PATIENCE_S):
            sandbox = await start_sandbox(backends[0], SMALL)
            opened.push_async_callback(sandbox.close)
            yield Processes(cluster, backends, sandbox)


async def test_running_command_is_finished_for_the_adopter_and_runs_once(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        script = "echo ran >> count; touch begun; until [ -e gate ]; do sleep 0.1; done; cat count"
        first = asyncio.create_task(
            found.sandbox.exec(script, timeout_s=PLENTY_S, command_id="a-1")
        )
        await output(found.sandbox, "until [ -e begun ]; do sleep 0.1; done")
        adopted = await adopt_sandbox(found.backends[1], reference)
        second = asyncio.create_task(adopted.exec(script, timeout_s=PLENTY_S, command_id="a-1"))
        await output(adopted, "touch gate")
        assert (await second).stdout == "ran\n"
        with pytest.raises(SandboxLostError, match="adopted"):
            await first
        await adopted.close()


async def test_adopter_gets_the_stored_result_of_a_command_that_the_first_process_ran(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        run = "echo ran >> count; cat count"
        result = await found.sandbox.exec(run, timeout_s=PLENTY_S, command_id="a-1")
        adopted = await adopt_sandbox(found.backends[1], reference)
        again = await adopted.exec(run, timeout_s=PLENTY_S, command_id="a-1")
        assert (again.stdout, again.duration_s) == ("ran\n", result.duration_s)
        assert await output(adopted, "cat count") == "ran\n"
        await adopted.close()


async def test_command_with_a_used_id_runs_again_only_after_results_are_forgotten(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        found.reference()
        run = "echo ran >> count; cat count"
        for expected in ("ran\n", "ran\n"):
            result = await found.sandbox.exec(run, timeout_s=PLENTY_S, command_id="a-1")
            assert result.stdout == expected
        found.sandbox.forget_results()
        result = await found.sandbox.exec(run, timeout_s=PLENTY_S, command_id="a-1")
        assert result.stdout == "ran\nran\n"


async def test_adopter_continues_jobs_and_gives_new_jobs_other_ids(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        job = await found.sandbox.exec(
            "read line; echo got $line", timeout_s=PLENTY_S, stdin=None, wait_s=PLENTY_S
        )
        assert job.waiting
        adopted = await adopt_sandbox(found.backends[1], found.reference())
        other = await adopted.exec("sleep 100", timeout_s=PLENTY_S, wait_s=0)
        assert other.job_id != job.job_id
        result = await adopted.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"it\n")
        assert result.stdout == "got it\n"
        await adopted.close()


async def test_adoption_reference_has_the_fields_of_the_current_checkpoint_version(
    tmp_path: Path,
) -> None:
    """A change needs a new version in `proxy.agent.checkpoint`, which stores references."""
    async with processes(tmp_path) as found:
        cap = OutputCap(1, 2, "/tmp/outputs", 3)
        await found.sandbox.exec("sleep 100", timeout_s=PLENTY_S, wait_s=0, cap=cap)
        reference = found.reference()
        assert set(reference) == {"guest", "generation", "jobs", "retained_bytes"}
        assert set(reference["guest"]) == {"pod", "owner", "link_token", "generation"}
        ((next_reading, cap_values, (_, bytes_left), is_named),) = reference["jobs"].values()
        assert (next_reading, cap_values) == (1, [1, 2, "/tmp/outputs", 3])
        assert (bytes_left, is_named) == (3, False)


async def test_command_repeated_by_the_adopter_names_the_same_file_with_the_full_output(
    tmp_path: Path,
) -> None:
    cap = OutputCap(max_bytes=1000, retention_directory="/tmp/outputs")
    async with processes(tmp_path) as found:
        reference = found.reference()
        first = await found.sandbox.exec("seq 9999", timeout_s=9, cap=cap, command_id="a-1")
        adopted = await adopt_sandbox(found.backends[1], reference)
        again = await adopted.exec("seq 9999", timeout_s=9, cap=cap, command_id="a-1")
        assert again.stdout == first.stdout
        assert (await output(adopted, f"wc -l < {again.stdout_file}")).strip() == "9999"
        await adopted.close()


async def test_earlier_owner_that_is_alive_cannot_end_a_sandbox_that_another_process_adopted(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        adopted = await adopt_sandbox(found.backends[1], reference)
        await found.sandbox.close()
        await write(adopted, "/testbed/file", b"content")
        assert await read(adopted, "/testbed/file") == b"content"
        await adopted.close()


async def test_adoption_reference_of_a_sandbox_can_be_used_only_once(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        adopted = await adopt_sandbox(found.backends[1], reference)
        with pytest.raises(SandboxGoneError):
            await adopt_sandbox(found.backends[2], reference)
        assert await output(adopted, "echo alive") == "alive\n"
        again = await adopt_sandbox(found.backends[2], found.reference(adopted))
        assert await output(again, "echo alive") == "alive\n"
        await again.close()


async def test_close_does_not_end_a_sandbox_whose_pod_has_another_owner_already(
    tmp_path: Path,
) -> None:
    """The other process has changed the label, and its adoption has not reached the agent."""
    async with processes(tmp_path) as found:
        reference = found.reference()
        (pod,) = found.cluster.pods.values()
        pod.document["metadata"]["labels"][OWNER_LABEL] = reference["guest"]["owner"] = "another"
        await found.sandbox.close()
        adopted = await adopt_sandbox(found.backends[1], reference)
        assert await output(adopted, "echo alive") == "alive\n"
        await adopted.close()


@pytest.mark.parametrize("adopter", [0, 1])
async def test_abandoned_sandbox_is_left_to_the_process_that_adopts_it(
    tmp_path: Path, adopter: int
) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        script = "echo ran >> count; touch begun; until [ -e gate ]; do sleep 0.1; done; cat count"
        first = asyncio.create_task(
            found.sandbox.exec(script, timeout_s=PLENTY_S, command_id="a-1")
        )
        await output(found.sandbox, "until [ -e begun ]; do sleep 0.1; done")
        found.sandbox.abandon()
        first.cancel()
        await asyncio.wait([first])
        await found.sandbox.close()
        assert await found.backends[0].sweep() == 0
        adopted = await adopt_sandbox(found.backends[adopter], reference)
        assert await found.backends[0].sweep() == 0
        second = asyncio.create_task(adopted.exec(script, timeout_s=PLENTY_S, command_id="a-1"))
        await output(adopted, "touch gate")
        assert (await second).stdout == "ran\n"
        await adopted.close()
        (pod,) = found.cluster.pods.values()
        assert "deletionTimestamp" in pod.document["metadata"]


async def test_abandoned_sandbox_is_swept_once_it_has_ended(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        found.reference()
        found.sandbox.abandon()
        await found.sandbox.close()
        assert await found.backends[0].sweep() == 0
        (pod,) = found.cluster.pods.values()
        pod.process.kill()
        await until(lambda: pod.document["status"]["phase"] == "Failed")
        assert await found.backends[0].sweep() == 1
        assert "deletionTimestamp" in pod.document["metadata"]


async def test_abandon_has_no_effect_on_a_sandbox_without_an_adoption_reference(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        found.sandbox.abandon()
        assert await output(found.sandbox, "echo alive") == "alive\n"


async def test_process_does_not_adopt_a_sandbox_that_it_uses(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        with pytest.raises(SandboxGoneError):
            await adopt_sandbox(found.backends[0], reference)
        assert await output(found.sandbox, "echo alive") == "alive\n"
        adopted = await adopt_sandbox(found.backends[1], reference)
        with pytest.raises(SandboxGoneError):
            await adopt_sandbox(found.backends[1], reference)
        assert await output(adopted, "echo alive") == "alive\n"
        await adopted.close()


async def test_sandbox_is_adopted_if_the_response_to_the_change_of_its_owner_is_lost(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        found.cluster.loses_responses_to_patches = True
        adopted = await adopt_sandbox(found.backends[1], found.reference())
        assert await found.backends[1].sweep() == 0
        assert await output(adopted, "echo alive") == "alive\n"
        await adopted.close()


async def test_adoption_attaches_again_if_the_api_server_refuses_to_attach(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        found.cluster.refuses_to_attach = True
        refused = found.cluster.attach_calls + 2
        adoption = asyncio.create_task(adopt_sandbox(found.backends[1], reference))
        await until(lambda: found.cluster.attach_calls >= refused)
        found.cluster.refuses_to_attach = False
        adopted = await adoption
        assert await output(adopted, "echo alive") == "alive\n"
        await adopted.close()


async def test_adopted_sandbox_stays_usable_when_its_connections_are_cut(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        adopted = await adopt_sandbox(found.backends[1], found.reference())
        for n in range(3):
            found.cluster.cut_all()
            assert await output(adopted, f"echo {n}") == f"{n}\n"
        await adopted.close()


async def test_pod_that_changes_at_each_attempt_to_delete_it_is_left_to_a_sweep(
    tmp_path: Path,
) -> None:
    async with processes(tmp_path) as found:
        found.reference()
        found.cluster.changes_pods = True
        await found.sandbox.close()
        (pod,) = found.cluster.pods.values()
        assert "deletionTimestamp" not in pod.document["metadata"]
        found.cluster.changes_pods = False
        assert await found.backends[0].sweep() == 1
        assert "deletionTimestamp" in pod.document["metadata"]


async def test_ended_sandbox_cannot_be_adopted(tmp_path: Path) -> None:
    async with processes(tmp_path) as found:
        reference = found.reference()
        await found.sandbox.close()
        with pytest.raises(SandboxStartError):
            await adopt_sandbox(found.backends[1], reference)
        assert await found.backends[1].sweep() == 0


async def test_bubblewrap_sandbox_has_no_adoption_reference_and_cannot_be_adopted(
    tmp_path: Path,
) -> None:
    backend = BubblewrapBackend(state_dir=tmp_path)
    assert not backend.can_adopt
    sandbox = await start_sandbox(backend, SMALL)
    try:
        assert sandbox.reference() is None
        with pytest.raises(SandboxStartError):
            await adopt_sandbox(backend, {"guest": {}})
    finally:
        await sandbox.close()
        await backend.aclose()
