"""A model, a place for computers, and what the model can do in one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.profile import Profile
from policies.prompts import Equipment
from proxy.agent.egress_watch import EgressWatch
from proxy.agent.events import Emit
from proxy.agent.loop import AgentLoop
from proxy.agent.model import Model
from proxy.agent.task import Result, Task
from proxy.agent.context_windows import Windows
from proxy.workspaces import Workspaces
from sandbox_runtime.tools.base import Tool


@dataclass(frozen=True, slots=True)
class Agent:
    """A model, a place for computers, and what the model can do in one."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[Profile], Sequence[Tool]]
    equipment: Equipment = Equipment()
    windows: Windows = field(default_factory=Windows)

    async def window(self, task: Task) -> int | None:
        """How many tokens the task's model takes, as far as is known before it was asked."""
        return await self.windows.of_first_asked(self.door(task), task.owner, task.model)

    def door(self, task: Task) -> Model:
        """The model, reached with the client's own key where the task has one."""
        return self.model.for_client(task.credentials) if task.credentials else self.model

    async def run(self, task: Task, emit: Emit) -> Result:
        """Answer one request; what happens on the way goes to `emit`.

        Raises BackendError when the model fails for good, SandboxError when the sandbox does.
        """
        began = time.monotonic()
        watch = EgressWatch(task, emit)
        async with self.workspaces.use(
            task.goes_on, task.profile.isolation, watch.decided, watch.asked
        ) as seat:
            if task.profile.computer == "always":
                await seat.ask()
            run = AgentLoop(
                self.door(task),
                self.windows,
                self.make_tools(task.profile),
                self.equipment,
                task,
                emit,
                seat,
                watch,
                began,
            )
            try:
                result = await run.go()
            finally:
                watch.close()
                await run.budget.close()
            seat.leave_as = task.leaves or (task.parks if result.parked else None)
            return result
