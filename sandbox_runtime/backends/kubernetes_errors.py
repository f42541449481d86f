"""The failures of a Kubernetes cluster in the terms of the sandbox runtime: the errors of its API,
and the states of a Pod that does not start or that has ended."""

from collections.abc import Iterator, Mapping
from typing import Any

from sandbox_runtime.backends.kubernetes_pod import AGENT_PATH
from sandbox_runtime.errors import NoCapacityError, SandboxStartError

Json = Mapping[str, Any]
"""A JSON object of the Kubernetes API."""

MAX_REASON_CHARS = 500
CAPACITY_RETRY_S = 15.0
"""The Retry-After of a request that found the cluster full: a sandbox may end, or a node may be
added."""
_UNSTARTABLE = frozenset(
    {
        *("InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "ImageInspectError"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)
"""Reasons of a waiting container that will not start by itself. `ErrImagePull` is not among them:
`ImagePullBackOff` follows it after the second attempt."""
_IMAGE_REASONS = frozenset({"InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff"})
_OUT_OF_RESOURCES = ("OutOf", "Evicted", "Preempting", "NodeAffinity", "UnexpectedAdmissionError")
"""Beginnings of the reasons for which a kubelet refuses a Pod that does not fit its node."""
_NO_PROGRAM_EXIT_CODE, _SIGKILL_EXIT_CODE = 127, 137


class KubernetesError(Exception):
    """The API server refused a request, for the reason in the text, or does not answer.

    `status` is the HTTP status of the response, or 0 if there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(one_line(message))
        self.status = status


class NotFoundError(KubernetesError):
    """The object or its namespace does not exist."""


class AlreadyExistsError(KubernetesError):
    """An object with this name exists."""


class ConflictError(KubernetesError):
    """The object has changed since the version that the request names."""


class ExpiredError(KubernetesError):
    """A watch's resource version is too old."""


class QuotaError(KubernetesError):
    """The namespace's ResourceQuota is exhausted."""


def error_of(status: int, body: Json) -> KubernetesError:
    """Return the error for a response whose status is 400 or more and whose body is a Status."""
    message = str(body.get("message") or f"HTTP status {status}")
    reason = body.get("reason")
    if status == 403 and "exceeded quota" in message:
        return QuotaError(message, status)
    kinds = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}
    kind = AlreadyExistsError if reason == "AlreadyExists" else kinds.get(status, KubernetesError)
    return kind(message, status)


def start_error(error: KubernetesError, namespace: str) -> SandboxStartError:
    """Translate an error of the API that occurred while a Pod started into an error of the sandbox
    runtime."""
    if isinstance(error, QuotaError) or error.status == 429:
        return NoCapacityError(f"the cluster is full: {error}", retry_after_s=CAPACITY_RETRY_S)
    if error.status in (401, 403):
        return SandboxStartError(
            f"the proxy may not start Pods in namespace {namespace!r}, see deploy/kubernetes: "
            f"{error}"
        )
    return SandboxStartError(f"cannot start a Pod: {error}")


def start_failure(pod: Json) -> SandboxStartError | None:
    """Return the error for a Pod that will not start, or None if it runs or may still start."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return SandboxStartError(f"Pod {name} was deleted from outside")
    reason = str(status.get("reason") or "")
    if status.get("phase") == "Failed" and reason.startswith(_OUT_OF_RESOURCES):
        why = f"the node of Pod {name} has no room: {one_line(status.get('message'))}"
        return NoCapacityError(why, retry_after_s=CAPACITY_RETRY_S)
    if status.get("phase") in ("Failed", "Succeeded"):
        return SandboxStartError(f"Pod {name} has ended: {cause_of_end(pod) or _exit_text(status)}")
    for image, waiting in _waiting_containers(pod):
        if waiting.get("reason") in _IMAGE_REASONS:
            return SandboxStartError(f"image {image!r} cannot be pulled: {_state_text(waiting)}")
        if waiting.get("reason") in _UNSTARTABLE:
            return SandboxStartError(
                f"a container of {image!r} cannot start: {_state_text(waiting)}"
            )
    return None


def not_ready_error(pod: Json | None, name: str, waited_s: float) -> SandboxStartError:
    """Return the error for a Pod that does not run after `waited_s` seconds."""
    if pod is None:
        return SandboxStartError(f"Pod {name} was not seen within {waited_s:g} s")
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("reason") == "Unschedulable":
            why = f"no node has room for Pod {name}: {one_line(condition.get('message'))}"
            return NoCapacityError(why, retry_after_s=CAPACITY_RETRY_S)
    waits = [f"{image!r}: {_state_text(waiting)}" for image, waiting in _waiting_containers(pod)]
    why = "; ".join(waits) or str((pod.get("status") or {}).get("phase"))
    return SandboxStartError(f"Pod {name} does not run after {waited_s:g} s: {why}")


def is_running(pod: Json) -> bool:
    """Return True if the container of the sandbox runs."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any("running" in (each.get("state") or {}) for each in statuses)


def has_ended(pod: Json) -> bool:
    """Return True if all containers have ended or the Pod is being deleted."""
    phase = (pod.get("status") or {}).get("phase")
    return phase in ("Failed", "Succeeded") or bool(pod["metadata"].get("deletionTimestamp"))


def has_stopped(pod: Json | None) -> bool:
    """Return True if no container of a deleted Pod runs any more. The kubelet removes the Pod's
    object some seconds later, when it has cleaned up the node."""
    status = (pod and pod.get("status")) or {}
    return not any(
        "running" in (container.get("state") or {})
        for kind in ("initContainerStatuses", "containerStatuses")
        for container in status.get(kind) or ()
    )


def cause_of_end(pod: Json | None) -> str:
    """Return why a Pod has ended, or an empty string if its main process ended by itself for no
    known reason."""
    if pod is None:
        return "its Pod was deleted from outside"
    status = pod.get("status") or {}
    if reason := status.get("reason"):  # such as Evicted or DeadlineExceeded
        return f"{reason}: {one_line(status.get('message'))}"
    for terminated in _terminated_states(status):
        if terminated.get("reason") == "OOMKilled":
            return "memory ran out and it was killed"
        if terminated.get("reason") in ("ContainerCannotRun", "StartError"):
            return one_line(terminated.get("message"))
    if pod["metadata"].get("deletionTimestamp"):
        return "its Pod was deleted from outside"
    codes = _exit_codes(status)
    if _NO_PROGRAM_EXIT_CODE in codes:
        return f"the image lacks {AGENT_PATH}; see sandbox.kubernetes.agent_image"
    return "it was killed on its node" if _SIGKILL_EXIT_CODE in codes else ""


def one_line(text: object) -> str:
    """Return the first line of a text, at most MAX_REASON_CHARS of it."""
    return str(text or "no reason given").strip().partition("\n")[0][:MAX_REASON_CHARS]


def _waiting_containers(pod: Json) -> Iterator[tuple[str, Json]]:
    """Yield the image and the state of each container that waits."""
    status = pod.get("status") or {}
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            if waiting := (container.get("state") or {}).get("waiting"):
                yield str(container.get("image")), waiting


def _terminated_states(status: Json) -> Iterator[Json]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            if terminated := (container.get("state") or {}).get("terminated"):
                yield terminated


def _exit_codes(status: Json) -> list[object]:
    return [state.get("exitCode") for state in _terminated_states(status)]


def _exit_text(status: Json) -> str:
    return f"its processes ended with {', '.join(map(str, _exit_codes(status)))}"


def _state_text(state: Json) -> str:
    return f"{state.get('reason')}: {one_line(state.get('message'))}"
