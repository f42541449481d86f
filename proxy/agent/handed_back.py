"""The files that a run hands back, and those that it does not."""

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
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

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
) -> HandedBack:
    """Take the files out of the sandbox that the run has used, if it has used one. Where it is
    lost, the answer is there all the same."""
    sandbox = toolbox.computer
    if sandbox is None:
        return HandedBack()
    try:
        produced = await outputs.produced(sandbox, await writer.dead_links())
    except SandboxLostError:
        toolbox.computer = None
        return HandedBack(notices=(SANDBOX_LOST,))
    return await hand_back(sandbox, produced, task, guard, emit)


async def hand_back(
    sandbox: Sandbox, produced: Sequence[Produced], task: Task, guard: Guard, emit: Emit
) -> HandedBack:
    """Take out what rules and limits allow of the produced files."""
    notices = await guard.withhold(produced)
    told = list(notices.values())
    allowed = [file for file in produced if file.path not in notices]
    selection = select(allowed, task.profile.artifacts)
    artifacts, left_out, names = [], list(selection.left_out), ShownNames()
    left_out += [LeftOut(f.path, f.bytes, "rule") for f in produced if f.path in notices]
    for n, file in enumerate(selection.chosen):
        try:
            artifact = await task.outbox.save(sandbox, file)
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
