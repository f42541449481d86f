"""The checks of a cluster: what this client may do, and whether a network policy keeps sandboxes
from the network.

Nothing in the API says whether a cluster enforces network policies. So two Pods try to connect to
the same addresses: one is labelled like a sandbox, the other has a label whose traffic the policy
of deploy/kubernetes allows. The policy is enforced if only the second one gets through.
"""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_errors import (
    Json,
    not_ready_error,
    one_line,
    start_failure,
)
from sandbox_runtime.backends.kubernetes_pod import PodSpec
from sandbox_runtime.backends.kubernetes_watch import PodWatch
from sandbox_runtime.backends.limits import PENDING_SIGNAL_ATTEMPTS
from sandbox_runtime.errors import SandboxStartError

CONTROL_COMPONENT = "network-check"
"""The component whose Pods may use the network, in the policies of deploy/kubernetes."""
CONNECT_S = 5
"""Maximum time for a connection: a network plugin may let a Pod connect only some time after its
start."""
KUBELET_PORT = "10250"
_MAX_REACHED = 10
_CONNECT = f"""
connect() {{ timeout {CONNECT_S} bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null \
&& echo "$1:$2"; }}
api=$KUBERNETES_SERVICE_HOST
[ -n "$api" ] && set -- "$@" "$api" "$KUBERNETES_SERVICE_PORT"
set -- "$@" "$NODE" {KUBELET_PORT}
while [ $# -gt 1 ]; do connect "$1" "$2" & shift 2; done > /dev/termination-log
wait
"""
"""A shell script that tries to connect to the addresses in its arguments, to the API server and to
the node. It writes the addresses that accept a connection into the Pod's status."""
VERBS = (
    *(("", verb, "pods", "") for verb in ("create", "get", "list", "watch", "patch", "delete")),
    *(("", verb, "pods", "attach") for verb in ("get", "create")),
    *(
        ("coordination.k8s.io", verb, "leases", "")
        for verb in ("create", "list", "patch", "delete")
    ),
)
"""The group, verb, resource and subresource of each API request that the backend makes."""
_NETWORK_ATTEMPTS = (
    *("interfaces", "metadata", "link_local", "private_networks", "public_networks", "multicast"),
    "host_addresses",
)
"""Names of escape attempts that look for an interface or a route. They send nothing, so no policy
stops them."""
_SYSTEM_CALL_ATTEMPTS = (
    *("io_uring", "asynchronous_io", "huge_pages", "huge_memory_file", "huge_shared_memory"),
    *("ptrace", "vsock", "netlink", "typing_into_a_terminal", "own_terminal"),
)


@dataclass(frozen=True, slots=True)
class NetworkVerdict:
    """The addresses to which the Pods of the network check could connect."""

    reached_by_sandbox: tuple[str, ...]
    """Addresses that the Pod with the label of a sandbox could reach."""
    reached_by_control: tuple[str, ...]
    """Addresses that the Pod that may use the network could reach."""

    @property
    def is_enforced(self) -> bool:
        """True if a network policy demonstrably keeps sandboxes from the network."""
        return not self.reached_by_sandbox and bool(self.reached_by_control)

    def text(self) -> str:
        """Return the verdict as a sentence."""
        if self.reached_by_sandbox:
            reached = ", ".join(self.reached_by_sandbox)
            return f"no enforced network policy keeps a sandbox from {reached}"
        if not self.reached_by_control:
            return (
                "it cannot be verified that a policy is enforced: a Pod with the label"
                f" app.kubernetes.io/component={CONTROL_COMPONENT}, which may use the network,"
                " reaches nothing either"
            )
        return f"a policy is enforced: sandboxes do not reach {', '.join(self.reached_by_control)}"


async def network_verdict(
    api: KubernetesApi,
    watch: PodWatch,
    spec: PodSpec,
    owner: str,
    target: tuple[str, int],
    timeout_s: float,
) -> NetworkVerdict:
    """Run the network check with two Pods of an owner, which both try to connect to `target` and
    other addresses. Raises KubernetesError, and SandboxStartError if a Pod does not end within
    `timeout_s`."""
    addresses = [target[0], str(target[1])]
    run = (
        _run_check_pod(api, watch, spec, owner, component, addresses, timeout_s)
        for component in ("sandbox", CONTROL_COMPONENT)
    )
    sandbox_pod, control_pod = await asyncio.gather(*run)
    return NetworkVerdict(_reached_addresses(sandbox_pod), _reached_addresses(control_pod))


async def _run_check_pod(
    api: KubernetesApi,
    watch: PodWatch,
    spec: PodSpec,
    owner: str,
    component: str,
    addresses: Sequence[str],
    timeout_s: float,
) -> Json:
    """Run the connection attempts in a Pod and return the Pod's last state."""
    name = f"check-{owner}-{uuid.uuid4().hex[:8]}"
    argv = ["bash", "-c", _CONNECT, "check", *addresses]
    pod = spec.command_pod(name, owner, component, argv, int(timeout_s))
    container = pod["spec"]["containers"][0]
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    container["env"].append(node)
    try:
        await api.create_pod(pod)
        await watch.wait(name, lambda seen: seen is not None and _has_settled(seen), timeout_s)
        found = watch.pod(name)
        if found and (found.get("status") or {}).get("phase") == "Succeeded":
            return found
        failure = start_failure(found) if found else None
        raise failure or not_ready_error(found, name, timeout_s)
    finally:
        await asyncio.shield(api.delete_pod(name))


def _has_settled(pod: Json) -> bool:
    is_over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return is_over or start_failure(pod) is not None


def _reached_addresses(pod: Json) -> tuple[str, ...]:
    """Return the addresses that a Pod has written into its status."""
    container = pod["status"]["containerStatuses"][0]
    message = container["state"]["terminated"].get("message") or ""
    return tuple(sorted({one_line(line) for line in message.split()}))[:_MAX_REACHED]


async def permission_check(api: KubernetesApi) -> Check:
    """Check that this client may do everything that the backend does. Raises KubernetesError."""
    answers = await asyncio.gather(
        *(api.may(verb, resource, sub, group) for group, verb, resource, sub in VERBS)
    )
    missing = [
        f"{verb} {resource}{'/' + sub if sub else ''}"
        for (_, verb, resource, sub), allowed in zip(VERBS, answers, strict=True)
        if not allowed
    ]
    if missing:
        why = f"missing in namespace {api.namespace!r}: {', '.join(missing)}; see deploy/kubernetes"
        return Check("kubernetes permissions", False, why)
    return Check("kubernetes permissions", True, f"pods and leases in {api.namespace!r}")


def accepted_escapes(*, has_own_profile: bool) -> dict[str, str]:
    """Return the attempts to escape that succeed in Pods, and why that is accepted.
    `has_own_profile` is True if the nodes have the profile of deploy/kubernetes."""
    found = dict.fromkeys(_NETWORK_ATTEMPTS, "the network policy denies the packets of a Pod")
    found["kernel_secrets"] = "Kubernetes masks fewer files of /proc; the level strict has no root"
    shared = "at standard the Pods of a node share the counters of its root"
    found |= dict.fromkeys(PENDING_SIGNAL_ATTEMPTS, shared)
    if not has_own_profile:
        why = "the runtime's seccomp profile permits it, unlike sandbox.kubernetes.seccomp_profile"
        found |= dict.fromkeys(_SYSTEM_CALL_ATTEMPTS, why)
    return found


def isolation_checks(spec: PodSpec) -> Iterator[Check]:
    """Yield a description of each part of the isolation other than the network: kernel, system
    calls, limits and users. These checks never fail; their texts name the weaknesses."""
    kernel = (
        f"runtime class {spec.runtime_class}"
        if spec.runtime_class
        else "the nodes' default: sandboxes SHARE THE NODE'S KERNEL, and a kernel vulnerability"
        " lets code escape; for untrusted code install gVisor or Kata Containers and set"
        " sandbox.kubernetes.runtime_class"
    )
    yield Check("kubernetes runtime", True, kernel)
    profile = (
        f"filtered by the nodes' profile {spec.seccomp_profile}"
        if spec.seccomp_profile
        else "filtered by the runtime's default profile, which permits more than that of"
        " deploy/kubernetes/seccomp.json: install it on the nodes and set"
        " sandbox.kubernetes.seccomp_profile"
    )
    yield Check("kubernetes system calls", True, profile)
    yield Check(
        "kubernetes limits",
        True,
        "memory, cpu and disk by the Pod; processes at strict by RLIMIT_NPROC, at standard ONLY by"
        " the kubelet's podPidsLimit; disk speed is NOT LIMITED",
    )
    yield Check(
        "kubernetes users",
        True,
        "root at standard, less its capabilities; a host uid of its own for each sandbox at strict",
    )


def require_enforced(verdict: NetworkVerdict) -> None:
    """Raise SandboxStartError unless the policy is enforced."""
    if not verdict.is_enforced:
        raise SandboxStartError(
            f"{verdict.text()}. Apply deploy/kubernetes/sandboxes.yaml on a cluster whose"
            " network plugin enforces policies, or accept sandboxes with network access:"
            " sandbox.kubernetes.allow_unenforced_network_policy"
        )
