"""What doctor says of an engine, from what the engine says of itself."""

from typing import Any

from sandbox_runtime.backends.docker_check import findings

SOUND: dict[str, Any] = {
    "DefaultRuntime": "runc",
    "Runtimes": {"runc": {}, "runsc": {}},
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=default", "name=userns"],
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "CgroupVersion": "2",
}


def said(runtime: str | None = None, **facts: Any) -> dict[str, tuple[bool, str]]:
    found = findings({**SOUND, **facts}, runtime, "disk watched")
    return {each.name.removeprefix("docker "): (each.ok, each.detail) for each in found}


def test_a_shared_kernel_is_told_loudly_and_runscs_own_is_not() -> None:
    fine, words = said()["runtime"]
    assert fine
    assert "SHARE THE HOST'S KERNEL" in words
    assert said("runsc")["runtime"] == (
        True,
        "runsc: each sandbox has a kernel of its own, in user space",
    )
    assert said("kata")["runtime"] == (False, "the engine has no 'kata'; it has runc, runsc")


def test_limits_that_the_engine_cannot_set_are_told() -> None:
    assert said()["limits"] == (True, "memory, swap, cpu, pids by cgroup v2; disk watched")
    fine, words = said(SwapLimit=False)["limits"]
    assert (fine, words.rpartition("; ")[2]) == (True, "NOT LIMITED: swap")
    fine, words = said(PidsLimit=False, MemoryLimit=False)["limits"]
    assert (fine, words.rpartition("; ")[2]) == (False, "NOT LIMITED: memory, pids")


def test_whose_root_it_is_inside_is_told() -> None:
    assert "userns-remap is on" in said()["users"][1]
    assert "userns-remap is OFF" in said(SecurityOptions=["name=seccomp"])["users"][1]
    assert "without root" in said(SecurityOptions=["name=seccomp", "name=rootless"])["users"][1]


def test_an_engine_without_seccomp_is_not_good_enough() -> None:
    assert said()["system calls"] == (True, "filtered by our own profile")
    assert said("runsc")["system calls"] == (True, "answered by runsc's kernel")
    assert said(SecurityOptions=None)["system calls"][0] is False


def test_confinement_is_told() -> None:
    assert said()["confinement"][1].endswith("; apparmor")
    assert said(SecurityOptions=["name=seccomp"])["confinement"][1].endswith("no SELinux")
