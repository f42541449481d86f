"""What a run hands to its client to do: calls of the client's own tools."""

from collections.abc import Iterator
from typing import Any

from policies.sessions import GoesOn, function_call_id
from proxy.agent.ending import Ending
from proxy.agent.history import History
from proxy.agent.parking import Parked, minted_for
from proxy.agent.task import Task
from proxy.agent.tool_calls import ToolCall, as_custom


class HandedOver:
    """The calls as the client knows them, and the run that waits for what comes of them."""

    def __init__(self, task: Task, ending: Ending, new_id: "Iterator[str]") -> None:
        self._task = task
        self._ending = ending
        self._new_id = new_id
        self.calls = [self._for_client(call) for call in ending.client_calls]

    def _for_client(self, call: ToolCall) -> dict[str, Any]:
        made = {**call.raw, "id": self._minted(call)}
        return as_custom(made) if call.name in self._task.free_text else made

    def _minted(self, call: ToolCall) -> str:
        """An id of ours: models' own are not unique, and by ours we find the run again."""
        if (state := self._task.legacy_state) is not None:
            made = call.raw["function"]
            return function_call_id(state, made["name"], made["arguments"])
        if sent := self._ending.sent_ids.get(call.id):
            return sent
        is_ours = minted_for(call.id) == self._task.run_id
        return call.id if is_ours else next(self._new_id)

    def parked(self, history: History, *, began: bool) -> Parked | None:
        """The run, if it waits for the client; `began`: it has used a computer."""
        if not self.calls:
            return None
        task = self._task
        state = task.leaves or task.parks
        return Parked(
            messages=list(history.messages),
            ours_from=history.ours_from,
            calls=[
                (made["id"], call.id, call.name)
                for made, call in zip(self.calls, self._ending.client_calls, strict=True)
            ],
            as_text=self._ending.as_text,
            goes_on=GoesOn(state.session, [state.name]) if state else None,
            began=began or bool(task.resumes and task.resumes.began),
            marks=history.marks,
        )
