"""The certificates of a cluster and the kubeconfig files of its clients."""

import base64
from dataclasses import dataclass
from pathlib import Path

import trustme
import yaml

ADMINISTRATORS = "system:masters"
"""The group that may do everything, by Kubernetes' own rule."""
ADMIN = "admin"
API_SERVER = "api-server"
API_SERVER_TO_KUBELETS = "api-server-to-kubelets"
SERVICE_ACCOUNTS = "service-accounts"
"""The key that signs the tokens of service accounts."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate's file name, its user, group and addresses."""

    file: str
    user: str
    group: str = "none"
    addresses: tuple[str, ...] = ()


class Credentials:
    """A folder with one certificate authority, and a certificate and key for each identity."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "authority.pem"

    def certificate(self, name: str) -> Path:
        return self._folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self._folder / f"{name}.key"

    def kubeconfig(self, name: str) -> Path:
        return self._folder / f"{name}.kubeconfig"

    def create(self, api_server: str, identities: list[Identity]) -> None:
        """Create what is missing: all files belong to one authority, whose key is not kept."""
        if self.authority.exists():
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        authority = trustme.CA()
        for identity in identities:
            # trustme wants an address or a host name, also for clients.
            issued = authority.issue_cert(
                *(identity.addresses or (identity.file,)),
                common_name=identity.user,
                organization_name=identity.group,
            )
            issued.private_key_pem.write_to_path(self.key(identity.file))
            issued.cert_chain_pems[0].write_to_path(self.certificate(identity.file))
            kubeconfig = _kubeconfig(
                api_server,
                authority.cert_pem.bytes(),
                issued.cert_chain_pems[0].bytes(),
                issued.private_key_pem.bytes(),
            )
            self.kubeconfig(identity.file).write_text(kubeconfig, encoding="utf-8")
        # Last: it tells that the others are there.
        authority.cert_pem.write_to_path(self.authority)


def _kubeconfig(api_server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    user = {"client-certificate-data": text(certificate), "client-key-data": text(key)}
    cluster = {"server": api_server, "certificate-authority-data": text(authority)}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": "user"}}],
            "current-context": "context",
        }
    )
