"""The errors of a cluster and the states of its Pods in the terms of the sandbox runtime. The
responses and states are those of Kubernetes 1.20 and 1.33, shortened."""

from typing import Any

import pytest

from sandbox_runtime.backends.kubernetes_errors import (
    CAPACITY_RETRY_S,
    AlreadyExistsError,
    ExpiredError,
    Json,
    KubernetesError,
    NotFoundError,
    QuotaError,
    cause_of_end,
    error_of,
    has_stopped,
    is_running,
    not_ready_error,
    start_error,
    start_failure,
)
from sandbox_runtime.errors import NoCapacityError, SandboxStartError

QUOTA = (
    'pods "sandbox-1" is forbidden: exceeded quota: sandboxes, requested: pods=1, used: pods=64,'
    " limited: pods=64"
)
FORBIDDEN = 'pods is forbidden: User "system:anonymous" cannot create resource "pods"'


def status(code: int, reason: str, message: str = "why") -> KubernetesError:
    return error_of(code, {"kind": "Status", "code": code, "reason": reason, "message": message})


def pod(phase: str = "Pending", *, deleted: bool = False, **more: Any) -> Json:
    times = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    return {"metadata": {"name": "s-1", **times}, "status": {"phase": phase, **more}}


def container(kind: str, **state: Any) -> list[dict[str, Any]]:
    return [{"name": "sandbox", "image": "img:1", "state": {kind: state}}]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (status(404, "NotFound"), NotFoundError),
        (status(409, "AlreadyExists"), AlreadyExistsError),
        (status(410, "Expired"), ExpiredError),
        (status(403, "Forbidden", QUOTA), QuotaError),
        (status(403, "Forbidden", FORBIDDEN), KubernetesError),
        (status(500, "InternalError"), KubernetesError),
        (error_of(502, {}), KubernetesError),
    ],
)
def test_error_responses_of_the_api_map_to_error_classes(
    error: KubernetesError, kind: type[KubernetesError]
) -> None:
    assert type(error) is kind


@pytest.mark.parametrize("error", [status(403, "Forbidden", QUOTA), status(429, "TooManyRequests")])
def test_error_for_an_exceeded_quota_or_rate_limit_says_when_to_retry(
    error: KubernetesError,
) -> None:
    found = start_error(error, "sandboxes")
    assert isinstance(found, NoCapacityError)
    assert found.retry_after_s == CAPACITY_RETRY_S


def test_error_for_a_forbidden_request_names_the_namespace_and_the_manifests() -> None:
    found = start_error(status(403, "Forbidden", FORBIDDEN), "sandboxes")
    assert type(found) is SandboxStartError
    assert "namespace 'sandboxes'" in str(found)
    assert "deploy/kubernetes" in str(found)


@pytest.mark.parametrize(
    "state",
    [
        pod(),
        pod(containerStatuses=container("waiting", reason="ContainerCreating")),
        pod(containerStatuses=container("waiting", reason="ErrImagePull", message="timeout")),
        pod("Running", containerStatuses=container("running", startedAt="2026")),
    ],
)
def test_pod_that_may_still_start_is_not_reported_as_failed(state: Json) -> None:
    assert start_failure(state) is None


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            pod(containerStatuses=container("waiting", reason="ImagePullBackOff", message="none")),
            "image 'img:1' cannot be pulled: ImagePullBackOff: none",
        ),
        (
            pod(initContainerStatuses=container("waiting", reason="ErrImageNeverPull")),
            "image 'img:1' cannot be pulled: ErrImageNeverPull: no reason given",
        ),
        (
            pod(containerStatuses=container("waiting", reason="CreateContainerError", message="x")),
            "a container of 'img:1' cannot start: CreateContainerError: x",
        ),
        (pod("Pending", deleted=True), "Pod s-1 was deleted from outside"),
        (
            pod("Failed", containerStatuses=container("terminated", exitCode=127, reason="Error")),
            "Pod s-1 has ended: the image lacks /.agent/agent; see sandbox.kubernetes.agent_image",
        ),
        (
            pod("Failed", containerStatuses=container("terminated", exitCode=1, reason="Error")),
            "Pod s-1 has ended: its processes ended with 1",
        ),
        (
            pod(
                "Failed",
                containerStatuses=container(
                    "terminated", reason="StartError", message="no /bin/sh"
                ),
            ),
            "Pod s-1 has ended: no /bin/sh",
        ),
    ],
)
def test_pod_that_cannot_start_fails_with_its_reason(state: Json, text: str) -> None:
    failure = start_failure(state)
    assert failure is not None
    assert str(failure) == text
    assert type(failure) is SandboxStartError


def test_pod_rejected_by_a_full_node_is_reported_as_a_no_capacity_error() -> None:
    failure = start_failure(pod("Failed", reason="OutOfmemory", message="Node didn't have enough"))
    assert isinstance(failure, NoCapacityError)


def test_unschedulable_pod_may_be_retried() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient memory.",
    }
    error = not_ready_error(pod(conditions=[condition]), "s-1", 60)
    assert isinstance(error, NoCapacityError)
    assert str(error) == (
        "no node has room for Pod s-1: 0/3 nodes are available: 3 Insufficient memory."
    )


def test_error_for_a_pod_that_is_not_ready_names_what_its_containers_wait_for() -> None:
    waiting = container("waiting", reason="ErrImagePull", message="i/o timeout")
    error = not_ready_error(pod(containerStatuses=waiting), "s-1", 60)
    assert str(error) == "Pod s-1 does not run after 60 s: 'img:1': ErrImagePull: i/o timeout"
    assert str(not_ready_error(None, "s-1", 60)) == "Pod s-1 was not seen within 60 s"


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (None, "its Pod was deleted from outside"),
        (pod("Running", deleted=True), "its Pod was deleted from outside"),
        (
            pod(
                "Failed", reason="DeadlineExceeded", message="Pod was active longer than specified"
            ),
            "DeadlineExceeded: Pod was active longer than specified",
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory.\nmore"),
            "Evicted: The node was low on resource: memory.",
        ),
        (
            pod(
                "Failed",
                containerStatuses=container("terminated", exitCode=137, reason="OOMKilled"),
            ),
            "memory ran out and it was killed",
        ),
        (
            pod("Failed", containerStatuses=container("terminated", exitCode=137, reason="Error")),
            "it was killed on its node",
        ),
        (
            pod("Failed", containerStatuses=container("terminated", exitCode=127, reason="Error")),
            "the image lacks /.agent/agent; see sandbox.kubernetes.agent_image",
        ),
        (pod("Succeeded", containerStatuses=container("terminated", exitCode=0)), ""),
    ],
)
def test_cause_of_a_pods_end_is_read_from_its_status(state: Json | None, cause: str) -> None:
    assert cause_of_end(state) == cause


def test_running_and_stopped_containers_are_recognised_in_the_status_of_a_pod() -> None:
    running = pod("Running", containerStatuses=container("running"))
    ended = pod("Failed", containerStatuses=container("terminated", exitCode=1))
    assert (is_running(running), is_running(ended), is_running(pod())) == (True, False, False)
    assert (has_stopped(running), has_stopped(ended), has_stopped(None)) == (False, True, True)
