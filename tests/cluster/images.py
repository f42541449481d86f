"""Put images into the containerd of nodes: no registry is needed."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.cluster.processes import ClusterError, run

PAUSE_IMAGE = "localhost/pause:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's names of the machines."""
IMAGE_NAMESPACE = "k8s.io"
"""The namespace of containerd in which the kubelet sees images."""


@dataclass(frozen=True, slots=True)
class ImageStore:
    """The images of one node: containerd's socket, and a folder that notes what was imported."""

    ctr: str
    socket: Path
    imported: Path

    @property
    def _ctr(self) -> list[str]:
        return [self.ctr, "--address", str(self.socket), "--namespace", IMAGE_NAMESPACE]

    def has(self, name: str, digest: str) -> bool:
        """Return True if this version of the image was imported."""
        note = self.imported / quote(name, safe="")
        return note.exists() and note.read_text(encoding="utf-8") == digest

    def start_import(self, archive: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._ctr, "images", "import", str(archive)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def remove(self, name: str) -> None:
        """Remove the name of an image, and so the image if it has no other. Raise ClusterError."""
        run(*self._ctr, "images", "rm", "--sync", name)
        (self.imported / quote(name, safe="")).unlink(missing_ok=True)

    def note(self, name: str, digest: str) -> None:
        self.imported.mkdir(exist_ok=True)
        (self.imported / quote(name, safe="")).write_text(digest, encoding="utf-8")


def load_docker_image(name: str, stores: Sequence[ImageStore]) -> None:
    """Copy an image of the Docker engine into the nodes that lack it. Raise ClusterError."""
    digest = run("docker", "image", "inspect", "--format", "{{.Id}}", name).strip()
    lacking = [store for store in stores if not store.has(name, digest)]
    if not lacking:
        return
    with tempfile.TemporaryDirectory(dir=lacking[0].imported.parent) as folder:
        archive = Path(folder, "image.tar")
        run("docker", "save", "--output", str(archive), name)
        _import(archive, name, digest, lacking)


def load_pause_image(program: Path, stores: Sequence[ImageStore]) -> None:
    """Put the image of the pause containers into the nodes that lack it. Raise ClusterError."""
    archive = _image_of(program)
    digest = hashlib.sha256(archive).hexdigest()
    if lacking := [store for store in stores if not store.has(PAUSE_IMAGE, digest)]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(archive)
            file.flush()
            _import(Path(file.name), PAUSE_IMAGE, digest, lacking)


def _import(archive: Path, name: str, digest: str, stores: Sequence[ImageStore]) -> None:
    """Import an archive into several nodes at a time."""
    imports = [store.start_import(archive) for store in stores]
    messages = [each.communicate()[1].decode(errors="replace").strip() for each in imports]
    for store, each, message in zip(stores, imports, messages, strict=True):
        if each.returncode:
            raise ClusterError(f"image {name} cannot be imported through {store.socket}: {message}")
        store.note(name, digest)


def _image_of(program: Path) -> bytes:
    """Return an image that consists of one static program, in the format of `docker save`."""
    layer = _tar({program.name: program.read_bytes()})
    configuration = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    return _tar(
        {
            "config.json": json.dumps(configuration).encode(),
            "manifest.json": json.dumps(manifest).encode(),
            "layer.tar": layer,
        }
    )


def _tar(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()
