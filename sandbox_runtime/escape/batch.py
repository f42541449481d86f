"""The attempts from inside, as one program that is sent into a sandbox."""

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from types import ModuleType

from sandbox_runtime.escape.inside import (
    devices,
    namespaces,
    network,
    powers,
    precedence,
    processes,
    settings,
    sockets,
    system_calls,
)
from sandbox_runtime.escape.inside.batch import attempts
from sandbox_runtime.escape.probe import Probe, Wall

_MODULES: tuple[tuple[ModuleType, Wall, bool], ...] = (
    (system_calls, "system calls", True),
    (namespaces, "namespaces", True),
    (sockets, "sockets", True),
    (settings, "settings", True),
    (devices, "devices", True),
    (precedence, "privileges", True),
    (powers, "privileges", False),
    (network, "network", False),
    (processes, "processes", False),
)
"""With the wall they try, and whether a kernel of the sandbox's own is wall enough."""
_OF_ITS_OWN_KERNEL = frozenset({"agent_descriptors", "agent_environment"})
"""gVisor lets root inside see these of the agent, with which it can fool nobody but itself."""
_PACKAGE = "sandbox_runtime.escape.inside"
_LOADER = """
import sys, types, json
for name, source in json.loads({modules!r}):
    package = name
    while "." in package:
        package = package.rpartition(".")[0]
        sys.modules.setdefault(package, types.ModuleType(package))
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads({argument!r}))
"""
"""Modules as one Python program, which calls `main` of the last one."""


def probes() -> Iterator[Probe]:
    """All attempts from inside."""
    for module, wall, own_kernel_holds in _MODULES:
        for attempt in attempts(module):
            assert attempt.__doc__
            name = attempt.__name__
            holds = own_kernel_holds or name in _OF_ITS_OWN_KERNEL
            yield Probe(name, wall, attempt.__doc__, holds)


def program() -> bytes:
    """What makes them all, and says on which kernel, for a Python inside to read."""
    return _program([module.__name__ for module, _, _ in _MODULES])


def kernel_program() -> bytes:
    """What only says on which kernel."""
    return _program([])


def _program(names: Sequence[str]) -> bytes:
    here = resources.files("sandbox_runtime")
    modules = []
    for name in (f"{_PACKAGE}.attempt", *names, f"{_PACKAGE}.batch"):
        path = name.removeprefix("sandbox_runtime.").replace(".", "/") + ".py"
        modules.append((name, (here / path).read_text(encoding="utf-8")))
    return _LOADER.format(modules=json.dumps(modules), argument=json.dumps(names)).encode()
