"""The files that a run hands back, and those that it does not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.artifacts import LeftOut, Produced, select
from policies.file_names import ShownNames
from proxy.agent.answer import AnswerWriter
from proxy.agent.events import Emit, FileProduced
from proxy.agent.guard import Guard
from proxy.agent.outputs import Outputs
from proxy.agent.task import Artifact, Notice, Task
from proxy.agent.toolbox import Toolbox
from sandbox_runtime.errors import FileTimeoutError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

NOT_ALL_LISTED = Notice(
    "files_not_listed",
    "The output directory has more files than could be listed: those that are missing stay there.",
)
SANDBOX_LOST = Notice(
    "sandbox_lost",
    "The sandbox was lost before all files were taken out of it: those that are missing are gone.",
)


@dataclass(frozen=True, slots=True)
class HandedBack:
    """One run's."""

    artifacts: Sequence[Artifact] = ()
    left_out: Sequence[LeftOut] = ()
    notices: Sequence[Notice] = ()
    """What is told of files that a rule withholds, or that are lost."""


async def hand_back_all(
    toolbox: Toolbox,
    outputs: Outputs,
    writer: AnswerWriter,
    task: Task,
    guard: Guard,
    emit: Emit,
    seconds: float,
) -> HandedBack:
    """Take the files out of the sandbox that the run has used, if it has used one, in so many
    seconds. Where it is lost or too slow, the answer is there all the same."""
    end = asyncio.get_running_loop().time() + seconds
    sandbox = toolbox.computer
    if sandbox is None:
        return HandedBack()
    try:
        found = await outputs.produced(sandbox, await writer.dead_links(), seconds)
    except SandboxLostError:
        toolbox.computer = None
        return HandedBack(notices=(SANDBOX_LOST,))
    handed_back = await hand_back(sandbox, found.produced, task, guard, emit, end)
    return replace(
        handed_back,
        left_out=[*handed_back.left_out, *found.left_out],
        notices=[*handed_back.notices, *(() if found.is_whole else (NOT_ALL_LISTED,))],
    )


async def hand_back(
    sandbox: Sandbox,
    produced: Sequence[Produced],
    task: Task,
    guard: Guard,
    emit: Emit,
    end: float,
) -> HandedBack:
    """Take out what rules and limits allow of the produced files, until the loop's time `end`."""
    notices = await guard.withhold(produced)
    told = list(notices.values())
    allowed = [file for file in produced if file.path not in notices]
    selection = select(allowed, task.profile.artifacts)
    artifacts, left_out, names = [], list(selection.left_out), ShownNames()
    left_out += [LeftOut(f.path, f.bytes, "rule") for f in produced if f.path in notices]
    for n, file in enumerate(selection.chosen):
        try:
            left_s = max(0.0, end - asyncio.get_running_loop().time())
            artifact = await task.outbox.save(sandbox, file, left_s)
        except FileTimeoutError:
            left_out += [LeftOut(each.path, each.bytes, "no_time") for each in selection.chosen[n:]]
            break
        except SandboxFileError:
            left_out.append(LeftOut(file.path, file.bytes, "changed"))  # a process still runs
            continue
        except SandboxLostError:
            left_out += [LeftOut(each.path, each.bytes, "lost") for each in selection.chosen[n:]]
            told.append(SANDBOX_LOST)
            break
        artifacts.append(replace(artifact, filename=names.give(artifact.path)))
        await emit(FileProduced(artifact.file_id, artifact.path, artifact.bytes))
    return HandedBack(artifacts, left_out, told)
