"""Install Kubernetes and the programs it runs on into the user's cache.

`python -m tests.cluster.install` builds Kubernetes from Debian's source package in four to ten
minutes, and unpacks etcd, containerd, runc, the CNI plugins and kubectl from Debian's packages.
Nothing is installed on the machine itself, and its package lists stay as they are. A version that
is already in the cache is not installed again. With `--find`, the command only prints the
installed paths, or fails if there are none.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.engines.installation import NotInstalledError, build_folder, cache_folder, report, run

RELEASE = "bookworm"
"""The last release of Debian whose source package has the servers. Later ones have only kubectl."""
VERSION = "1.20.2"
SOURCE_VERSION = "1.20.5+really1.20.2-1.1+deb12u1"
RECIPE = 1
"""Raised with each change of the build, so that an older installation is not used."""
GO = "go-1.19"
BUILD_PACKAGES = (
    *(f"golang-{GO.removeprefix('go-')}-{part}" for part in ("go", "src")),
    "golang-github-modern-go-reflect2-dev",
)
PACKAGES = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "kubernetes-client")
COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
MODULE = "k8s.io/kubernetes"
OPENAPI = "pkg/generated/openapi"
OPENAPI_TAG = re.compile(r"^// *\+k8s:openapi-gen=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Installation:
    """The folders of the programs: those built here, and the root of the unpacked packages."""

    built: Path
    packages: Path

    def program(self, name: str) -> str:
        """Return the path of a program. Raise NotInstalledError."""
        for folder in (self.built, self.packages / "usr/bin", self.packages / "usr/sbin"):
            if (folder / name).is_file():
                return str(folder / name)
        raise NotInstalledError(f"no program {name} in {self.built.parent}; delete that folder")

    @property
    def cni_plugins(self) -> Path:
        return self.packages / "usr/lib/cni"


def find_installation() -> Installation:
    """Return the installation in the cache. Raise NotInstalledError."""
    if not directory().exists():
        raise NotInstalledError(
            f"no Kubernetes: {directory()} missing; `make kubernetes` builds it"
        )
    return Installation(directory() / "bin", directory() / "debian")


def directory() -> Path:
    """Return the cache folder of this version."""
    return cache_folder(f"kubernetes-{VERSION}-{RECIPE}")


def install() -> None:
    """Build and unpack what is missing. Raise CalledProcessError, TimeoutExpired, OSError or
    NotInstalledError.
    """
    if directory().exists():
        return
    with build_folder(directory()) as made:
        made.mkdir()
        work = made.parent / "work"
        apt = Apt(work / "apt")
        apt.unpack(PACKAGES, made / "debian")
        apt.unpack(BUILD_PACKAGES, work / "debian")
        tree = work / "gopath/src" / MODULE
        apt.unpack_source("kubernetes", SOURCE_VERSION, tree)
        _build(Go(work, tree), made / "bin")


class Apt:
    """Package lists and downloads in a folder of their own, from the machine's own archives."""

    def __init__(self, folder: Path) -> None:
        for name in ("lists/partial", "cache/archives/partial", "parts", "downloads"):
            (folder / name).mkdir(parents=True)
        (folder / "sources.list").write_text("\n".join([*_sources(), ""]), encoding="utf-8")
        configuration = folder / "apt.conf"
        configuration.write_text(
            f'Dir::State::lists "{folder}/lists";\n'
            f'Dir::Cache "{folder}/cache";\n'
            f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
            f'Dir::Etc::sourceparts "{folder}/parts";\n'
            # apt's own user may not enter the user's cache.
            'APT::Sandbox::User "root";\n',
            encoding="utf-8",
        )
        self._downloads = folder / "downloads"
        self._environment = {"APT_CONFIG": str(configuration)}
        run(["apt-get", "update", "-qq"], self._environment)

    def unpack(self, packages: tuple[str, ...], root: Path) -> None:
        """Unpack packages below `root`, without what they depend on."""
        root.mkdir()
        for package in packages:
            self._get("download", package)
            (archive,) = self._downloads.glob(f"{package}_*.deb")
            run(["dpkg-deb", "--extract", str(archive), str(root)])

    def unpack_source(self, package: str, version: str, folder: Path) -> None:
        """Unpack a source package, with Debian's patches applied."""
        self._get("source", "--download-only", f"{package}={version}")
        (description,) = self._downloads.glob(f"{package}_*.dsc")
        folder.parent.mkdir(parents=True)
        run(["dpkg-source", "--no-check", "--extract", str(description), str(folder)])

    def _get(self, *arguments: str) -> None:
        command = ["apt-get", "-qq", *arguments]
        environment = {**os.environ, **self._environment}
        subprocess.run(command, check=True, cwd=self._downloads, env=environment)


def _sources() -> Iterator[str]:
    """Yield the lines of a sources.list for the release, packages and sources."""
    # A deb822 file names its key, which the new line needs too; without one the field stays as is.
    fields = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(SIGNED_BY)"
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    )
    archives = [line.split(" ", 3) for line in sorted(set(listed.stdout.splitlines()))]
    suites = re.compile(rf"{RELEASE}(?:-updates|-security)?")
    archives = [each for each in archives if suites.fullmatch(each[1]) and each[2] == "main"]
    if not archives:
        raise NotInstalledError(f"apt has no archive of Debian's release {RELEASE}")
    for uri, suite, component, key in archives:
        options = f"[signed-by={key}] " if key.startswith("/") else ""
        for kind in ("deb", "deb-src"):
            yield f"{kind} {options}{uri} {suite} {component}"


class Go:
    """Go's tools in the tree of Kubernetes."""

    def __init__(self, work: Path, tree: Path) -> None:
        root = work / "debian/usr/lib" / GO
        self.tree = tree
        self.packages = work / "debian/usr/share/gocode/src"
        self._environment: Mapping[str, str] = {
            **os.environ,
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "GOROOT": str(root),
            "GOPATH": str(work / "gopath"),
            "GOCACHE": str(work / "gocache"),
            "GOFLAGS": "",
            "GO111MODULE": "off",
            "CGO_ENABLED": "0",
        }

    def build(self, output: Path, *arguments: str) -> None:
        self.run(["go", "build", "-trimpath", "-o", str(output), *arguments])

    def run(self, command: list[str]) -> None:
        """Run a command in the tree. Raise CalledProcessError."""
        subprocess.run(command, check=True, cwd=self.tree, env=self._environment)


def _build(go: Go, output: Path) -> None:
    output.mkdir()
    # The vendored version crashes in programs built by Go 1.18 and later.
    reflect2 = Path("github.com/modern-go/reflect2")
    vendored = go.tree / "vendor" / reflect2
    vendored.rename(go.tree.parent / "reflect2")
    (go.packages / reflect2).rename(vendored)
    _generate_openapi(go)
    major, minor, _ = VERSION.split(".")
    version = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    variables = " ".join(
        f"-X {MODULE}/vendor/{package}/version.{name}={value}"
        for package in ("k8s.io/component-base", "k8s.io/client-go/pkg")
        for name, value in version.items()
    )
    # Without the clouds and dockershim, and without symbols: half the time and 60 % of the size.
    go.build(
        output,
        *("-tags", "providerless,dockerless", "-ldflags", f"-s -w {variables}"),
        *(f"./cmd/{command}" for command in COMMANDS),
    )
    go.build(output / "pause", "-ldflags", "-s -w", str(Path(__file__).with_name("pause.go")))


def _generate_openapi(go: Go) -> None:
    """Generate the API description, the one generated file that the source package lacks."""
    generator = go.tree / "openapi-gen"
    go.build(generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    violations = go.tree / "violations.report"
    go.run(
        [
            *(str(generator), "--logtostderr", "-i", ",".join(_openapi_packages(go.tree))),
            *("-p", f"{MODULE}/{OPENAPI}", "-O", "zz_generated.openapi"),
            *("-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt", "-r", str(violations)),
        ]
    )
    known = go.tree / "api/api-rules/violation_exceptions.list"
    if violations.read_bytes() != known.read_bytes():
        raise NotInstalledError(f"openapi-gen found other violations than those of {known.name}")


def _openapi_packages(tree: Path) -> list[str]:
    """Return the packages that openapi-gen describes: those of the servers that have its tag."""
    others = ("staging/src/k8s.io/code-generator/", "staging/src/k8s.io/sample-apiserver/")
    tagged = {
        str(path.parent.relative_to(tree))
        for top in ("cmd", "pkg", "staging/src/k8s.io")
        for path in (tree / top).rglob("*.go")
        if OPENAPI_TAG.search(path.read_text(encoding="utf-8"))
    }
    return [
        f"{MODULE}/{re.sub('^staging/src/', 'vendor/', folder)}"
        for folder in sorted(tagged)
        if not f"{folder}/".startswith(others)
    ]


if __name__ == "__main__":
    sys.exit(report(install, find_installation))
