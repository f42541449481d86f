"""Root file systems made of this host's own programs, as `docker export` would write them."""

import re
import subprocess
import tarfile
from pathlib import Path


def add_programs(tar: tarfile.TarFile, names: tuple[str, ...]) -> None:
    """Add programs of /usr/bin and the libraries that they need, the link /bin to /usr/bin, and
    /tmp."""
    binaries = [Path("/usr/bin", name) for name in names]
    for binary in binaries:
        tar.add(binary.resolve(), str(binary).lstrip("/"))
    for library in set[Path]().union(*map(_libraries, binaries)):
        tar.add(library.resolve(), str(library).lstrip("/").removeprefix("usr/"))
    link = tarfile.TarInfo("bin")
    link.type, link.linkname = tarfile.SYMTYPE, "usr/bin"
    tar.addfile(link)
    directory = tarfile.TarInfo("tmp")
    directory.type, directory.mode = tarfile.DIRTYPE, 0o1777
    tar.addfile(directory)


def add_python(tar: tarfile.TarFile) -> None:
    """Add Python's standard library, for an added `python3`."""
    where = "import os; print(os.path.dirname(os.__file__))"
    library = subprocess.run(
        ["/usr/bin/python3", "-c", where], capture_output=True, check=True, text=True
    ).stdout.strip()
    tar.add(library, library.lstrip("/"), filter=_without_ballast)


def _libraries(binary: Path) -> set[Path]:
    found = subprocess.run(["ldd", binary], capture_output=True, check=True, text=True).stdout
    return {Path(each) for each in re.findall(r"(/\S+) \(0x", found)}


def _without_ballast(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(dist-packages|test|tkinter|config-3)", member.name) else member
