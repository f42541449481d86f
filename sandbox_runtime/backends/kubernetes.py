"""Sandboxes in Pods of a Kubernetes cluster.

Each sandbox is one Pod without a controller. The Pod's main process is the guest agent. The proxy
attaches to the agent's standard streams through the API server, so no port is opened and no program
is started with `exec`. If the connection is lost, the proxy attaches again, and no byte is lost. If
the proxy dies, the agent ends with its lease; the Pod's object remains until another proxy sweeps
it.

Unlike a local sandbox, a Pod has a network interface. A network policy must deny its traffic. The
backend starts no sandbox before it has verified that the cluster enforces the policy, unless the
configuration accepts sandboxes with network access.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check, run_to_end
from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_check import (
    NetworkVerdict,
    accepted_escapes,
    isolation_checks,
    network_verdict,
    permission_check,
    require_enforced,
)
from sandbox_runtime.backends.kubernetes_errors import (
    ConflictError,
    Json,
    KubernetesError,
    has_ended,
    is_running,
    not_ready_error,
    start_error,
    start_failure,
)
from sandbox_runtime.backends.kubernetes_guest import KubernetesGuest
from sandbox_runtime.backends.kubernetes_owner import SELECTOR, LeaseOwner
from sandbox_runtime.backends.kubernetes_pod import OWNER_LABEL, PodSpec, guest_config
from sandbox_runtime.backends.kubernetes_stream import AttachedStream
from sandbox_runtime.backends.kubernetes_watch import PodWatch
from sandbox_runtime.errors import SandboxGoneError, SandboxStartError
from sandbox_runtime.guest.agent import config_message
from sandbox_runtime.packets import MAX_GENERATION, TOKEN_BYTES
from sandbox_runtime.sandbox import SandboxReference

logger = logging.getLogger(__name__)

AGENT_LEASE_S = 30.0
"""Length of an agent's lease. An agent ends this long after it sent the last packet whose receipt
the proxy has confirmed."""
TAKEOVER_LEASE_S = 60.0
"""Length of an agent's lease if another process may adopt its sandbox. It leaves time for others to
find that the process is dead, and for its client to retry. It is not longer than `LEASE_S` of
`kubernetes_owner`, after which the Pods of a dead process are swept."""
LEASE_MARGIN_S = 5.0
"""Time from the end of a lease until the agent has certainly ended. Its Pod is given up only after
this time, so that no sandbox is replaced while it still runs."""
CAUSE_WAIT_S = 3.0
"""Maximum wait for the cause of a Pod's end, after the API server has refused to attach to the Pod:
the API server learns the cause later."""

PARALLEL_STARTS = 64
"""Number of Pods that this process starts at a time. The work of a start is the nodes' and the API
server's, not this host's."""


class KubernetesBackend:
    """Starts sandboxes as Pods in one namespace of one cluster; see KubernetesApi.

    A Pod must run within `start_timeout_s`, which includes pulling its images. `lease_s` is the
    length of an agent's lease; see AGENT_LEASE_S.
    """

    def __init__(
        self,
        spec: PodSpec,
        *,
        namespace: str,
        kubeconfig: Path | None = None,
        context: str | None = None,
        allow_unenforced_network_policy: bool = False,
        start_timeout_s: float = 60.0,
        lease_s: float = AGENT_LEASE_S,
    ) -> None:
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._lease_s = lease_s
        self._allow_unenforced = allow_unenforced_network_policy
        self._api = KubernetesApi(namespace, kubeconfig=kubeconfig, context=context)
        self._owner = LeaseOwner(self._api)
        self._watch = PodWatch(self._api, f"{OWNER_LABEL}={self._owner.id}")
        self._numbers = itertools.count(1)
        self._guests: dict[str, KubernetesGuest] = {}
        """This process's guests by the names of their Pods. A sweep leaves these Pods alone, except
        for abandoned ones that have ended. A guest is added before its creation or adoption, and
        removed when the removal of its Pod has succeeded or failed."""
        self._verdict: NetworkVerdict | None = None
        self._verdict_lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return "kubernetes"

    @property
    def accepted_escapes(self) -> Mapping[str, str]:
        return accepted_escapes(has_own_profile=bool(self._spec.seccomp_profile))

    @property
    def capacity(self) -> None:
        return None

    @property
    def parallel_starts(self) -> int:
        return PARALLEL_STARTS

    @property
    def can_resize(self) -> bool:
        return False

    @property
    def max_outage_s(self) -> float:
        return self._lease_s + LEASE_MARGIN_S

    async def start(self, isolation: Isolation) -> KubernetesGuest:
        name = f"sandbox-{self._owner.id}-{next(self._numbers)}"
        guest = self._new_guest(name)
        link_token = secrets.token_bytes(TOKEN_BYTES)
        try:
            await self._begin_ownership()
            if not self._allow_unenforced:
                require_enforced(await self._network_verdict())
            self._guests[name] = guest
            pod = self._spec.sandbox_pod(name, self._owner.id, isolation)
            await run_to_end(self._api.create_pod(pod))
            await self._wait_until_running(name)
            stream = await self._attach(name)
            stream.write(config_message(guest_config(isolation, link_token, self._lease_s)))
            guest.use_stream(stream, link_token)
            await stream.drain()
        except (KubernetesError, OSError) as error:
            await self._discard(guest)
            if isinstance(error, KubernetesError):
                raise start_error(error, self._api.namespace) from error
            raise SandboxStartError(f"Pod {name} ended while it started: {error}") from error
        except BaseException:  # such as a cancellation: no Pod may be left in the cluster
            with anyio.CancelScope(shield=True):
                await self._discard(guest)
            raise
        return guest

    @property
    def can_adopt(self) -> bool:
        return True

    async def adopt(self, reference: SandboxReference) -> KubernetesGuest:
        name, generation = reference["pod"], reference["generation"] + 1
        if generation > MAX_GENERATION or not self._may_adopt(name, reference["owner"]):
            raise SandboxGoneError(f"Pod {name} cannot be adopted again")
        guest = self._guests[name] = self._new_guest(name)
        try:
            await self._begin_ownership()
            await run_to_end(self._api.change_owner(name, reference["owner"], self._owner.id))
        except BaseException as error:
            # If the change had an effect nevertheless, a sweep removes the Pod.
            del self._guests[name]
            if isinstance(error, KubernetesError):
                raise SandboxGoneError(f"Pod {name} cannot be adopted: {error}") from error
            raise
        try:
            await guest.adopt(bytes.fromhex(reference["link_token"]), generation)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._discard(guest)
            raise
        return guest

    async def fingerprint(self) -> str:
        # A tag's digest is known only on the nodes, and differs between their architectures.
        return str(self._spec)

    async def sweep(self) -> int:
        try:
            return await self._sweep()
        except KubernetesError as error:
            logger.warning("leftovers could not be swept, the next sweep tries again: %s", error)
            return 0

    async def check(self) -> list[Check]:
        try:
            found = [
                Check("kubernetes api", True, f"{await self._api.version()} at {self._api.url}"),
                await permission_check(self._api),
            ]
        except KubernetesError as error:
            return [Check("kubernetes api", False, str(error))]
        if all(check.ok for check in found):
            found += [await self._check_network(), *isolation_checks(self._spec)]
            survives = f"agents end {self._lease_s:g} s after the last packet that arrived"
            found.append(Check("kubernetes connection", True, survives))
        return found

    async def aclose(self) -> None:
        await self._watch.aclose()
        await self._owner.release()
        await self._api.aclose()

    def _new_guest(self, name: str) -> KubernetesGuest:
        return KubernetesGuest(
            name,
            self._owner.id,
            self._api,
            self._watch,
            lambda name: self._guests.pop(name, None),
            self.max_outage_s,
        )

    def _may_adopt(self, name: str, owner: str) -> bool:
        """Return True if this process has abandoned the Pod, or if another process owns it and this
        process neither uses nor is removing it."""
        if guest := self._guests.get(name):
            return guest.is_abandoned
        return owner != self._owner.id

    async def _begin_ownership(self) -> None:
        """Create this process's Lease and start the watch of its Pods, unless that has been
        done."""
        await self._owner.begin()
        self._watch.start()

    async def _wait_until_running(self, name: str) -> None:
        """Wait until a Pod runs. Raises SandboxStartError."""

        def has_settled(pod: Json | None) -> bool:
            return pod is not None and (is_running(pod) or start_failure(pod) is not None)

        await self._watch.wait(name, has_settled, self._start_timeout_s)
        pod = self._watch.pod(name)
        if pod is not None and is_running(pod):
            return
        failure = start_failure(pod) if pod else None
        raise failure or not_ready_error(pod, name, self._start_timeout_s)

    async def _attach(self, name: str) -> AttachedStream:
        """Attach to a running Pod. Raises KubernetesError, and SandboxStartError if the Pod has
        ended."""
        try:
            return await self._api.attach(name)
        except KubernetesError as error:
            await self._watch.wait(name, lambda pod: pod is None or has_ended(pod), CAUSE_WAIT_S)
            pod = self._watch.pod(name)
            if failure := start_failure(pod) if pod else None:
                raise failure from error
            raise

    async def _discard(self, guest: KubernetesGuest) -> None:
        if guest.id in self._guests:
            await guest.kill()

    async def _network_verdict(self) -> NetworkVerdict:
        """Return the result of the network check, which is made once. Raises KubernetesError and
        SandboxStartError."""
        async with self._verdict_lock:
            if self._verdict is None:
                await self._begin_ownership()
                url = urlsplit(self._api.url)
                target = (url.hostname or "", url.port or 443)
                self._verdict = await network_verdict(
                    self._api,
                    self._watch,
                    self._spec,
                    self._owner.id,
                    target,
                    self._start_timeout_s,
                )
            return self._verdict

    async def _check_network(self) -> Check:
        try:
            verdict = await self._network_verdict()
            if not self._allow_unenforced:
                require_enforced(verdict)
        except SandboxStartError as error:
            return Check("kubernetes network", False, str(error))
        except KubernetesError as error:
            return Check("kubernetes network", False, str(start_error(error, self._api.namespace)))
        accepted = "" if verdict.is_enforced else " (accepted by the configuration)"
        return Check("kubernetes network", True, f"{verdict.text()}{accepted}")

    async def _sweep(self) -> int:
        # The Pods first: an owner creates its Lease before its Pods.
        pods, _ = await self._api.pods_and_version(SELECTOR)
        self._forget_abandoned({pod["metadata"]["name"] for pod in pods})
        living = await self._owner.living_owner_ids()
        leftovers = [pod for pod in pods if self._is_leftover(pod, living)]
        for pod in leftovers:
            metadata = pod["metadata"]
            with suppress(ConflictError):  # another process may have adopted it meanwhile
                await self._api.delete_pod(metadata["name"], metadata["resourceVersion"])
        await self._owner.remove_expired_leases(living)
        return len(leftovers)

    def _is_leftover(self, pod: Json, living: set[str]) -> bool:
        """Return True if a Pod is not in use: its owner is dead, or its removal failed earlier."""
        metadata = pod["metadata"]
        name, owner = str(metadata["name"]), metadata["labels"].get(OWNER_LABEL)
        if metadata.get("deletionTimestamp"):
            return False
        if owner != self._owner.id:
            return owner not in living
        if guest := self._guests.get(name):
            return guest.is_abandoned and has_ended(pod)
        return name.startswith("sandbox-")

    def _forget_abandoned(self, existing_names: set[str]) -> None:
        """Forget the abandoned Pods that no longer exist."""
        for name, guest in list(self._guests.items()):
            if guest.is_abandoned and name not in existing_names:
                del self._guests[name]
