"""Ownership of Pods: a Lease object that a proxy process renews as long as it lives.

A Pod whose owner's Lease is missing or was not renewed in time is a leftover of a dead process, and
any other proxy removes it. The times are those of the API server's clock, so the clocks of the
proxies' hosts do not matter.
"""

import asyncio
import logging
import uuid
from contextlib import suppress
from datetime import UTC, datetime

from sandbox_runtime.backends.kubernetes_api import KubernetesApi
from sandbox_runtime.backends.kubernetes_errors import (
    AlreadyExistsError,
    Json,
    KubernetesError,
    NotFoundError,
)
from sandbox_runtime.backends.kubernetes_pod import MANAGED_BY

logger = logging.getLogger(__name__)

LEASE_S = 60
"""Time without a renewal after which an owner counts as dead."""
RENEWAL_S = 15.0
"""Interval of the renewals: three may fail in succession."""
SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class LeaseOwner:
    """This process as an owner of Pods, from `begin` until `release`."""

    def __init__(self, api: KubernetesApi) -> None:
        self.id = uuid.uuid4().hex[:16]
        self._api = api
        self._task: asyncio.Task[None] | None = None
        self._begin_lock = asyncio.Lock()

    async def begin(self) -> None:
        """Create the Lease and begin to renew it, unless that has been done. Raises
        KubernetesError."""
        async with self._begin_lock:
            if self._task is None:
                await self._create()
                self._task = asyncio.create_task(self._renew_forever(), name="renewal of the Lease")

    async def living_owner_ids(self) -> set[str]:
        """Return the ids of this owner and of all owners whose Lease has not expired. Raises
        KubernetesError."""
        leases = await self._api.leases(SELECTOR)
        now_s = self._api.now_s()
        return {self.id, *(_owner_of(lease) for lease in leases if _expiry_s(lease) > now_s)}

    async def remove_expired_leases(self, living: set[str]) -> None:
        """Remove the Leases of dead owners. Raises KubernetesError."""
        for lease in await self._api.leases(SELECTOR):
            if _owner_of(lease) not in living and _expiry_s(lease) <= self._api.now_s():
                await self._api.delete_lease(lease["metadata"]["name"])

    async def release(self) -> None:
        """Stop renewing, and remove the Lease. Safe to call twice."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        try:
            await self._api.delete_lease(self._name)
        except KubernetesError as error:  # it expires by itself
            logger.warning("the Lease could not be removed: %s", error)

    @property
    def _name(self) -> str:
        return f"sandbox-owner-{self.id}"

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            try:
                await self._renew()
            except KubernetesError as error:
                logger.warning(
                    "the Lease could not be renewed, it expires in %d s: %s", LEASE_S, error
                )

    async def _renew(self) -> None:
        try:
            await self._api.change_lease(self._name, {"spec": self._lease_object()["spec"]})
        except NotFoundError:  # another proxy took this one for dead
            await self._create()

    async def _create(self) -> None:
        with suppress(AlreadyExistsError):  # an earlier attempt whose response was lost
            await self._api.create_lease(self._lease_object())

    def _lease_object(self) -> Json:
        renewed = datetime.fromtimestamp(self._api.now_s(), UTC).strftime(_TIME_FORMAT)
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "labels": MANAGED_BY},
            "spec": {
                "holderIdentity": self.id,
                "leaseDurationSeconds": LEASE_S,
                "renewTime": renewed,
            },
        }


def _owner_of(lease: Json) -> str:
    return str(lease["spec"].get("holderIdentity"))


def _expiry_s(lease: Json) -> float:
    """Return the Unix time at which a Lease expires; 0 if it has no valid time."""
    try:
        renewed = datetime.fromisoformat(lease["spec"]["renewTime"])
        return renewed.timestamp() + float(lease["spec"]["leaseDurationSeconds"])
    except (KeyError, TypeError, ValueError):
        return 0.0
