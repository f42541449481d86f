"""The loop of a run: ask the model, run its tool calls, tell it their results, until it is done."""

import asyncio
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from policies.answer_form import is_answer
from policies.limits import StopReason, time_plan
from policies.prompts import WHY_NO_MORE_TOOLS, SandboxContents
from proxy.agent.answer import AnswerWriter
from proxy.agent.artifacts import (
    SANDBOX_LOST,
    ArtifactCollector,
    CollectedArtifacts,
    collect_artifacts,
    read_manifest,
    remove_answer_files,
)
from proxy.agent.budget import MeteredModel, RunBudget
from proxy.agent.context import ObservationFiles
from proxy.agent.context_windows import ContextWindow, ContextWindows
from proxy.agent.conversation import Conversation
from proxy.agent.events import Emit, Narration, Refused, RunFinished, RunStarted, TurnStarted
from proxy.agent.final_answer import BestAnswer, FinalCall, prose_rules, when_shown
from proxy.agent.guard import EgressWatch, Guard
from proxy.agent.history import text_of
from proxy.agent.model import Completion, Model, refusal_of
from proxy.agent.outcome import RunOutcome, client_tool_calls, parked_run
from proxy.agent.prose import HOLD_CHARS, UNCHECKED, Prose, ProseRules
from proxy.agent.result import (
    CapabilityUse,
    Result,
    RunStats,
    RunWarning,
    times,
    token_counts,
    tokens,
)
from proxy.agent.styles import style_of
from proxy.agent.task import AgentInput, AgentTask, RunClock, out_of_time
from proxy.agent.tool_calls import Turn, only_of
from proxy.agent.tools import CallRunner, ToolExecutor, tool_name
from proxy.agent.turn_stream import FirstCall, StreamHandler, client_call_stream
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.workspaces import WorkspaceLease
from sandbox_runtime.errors import SandboxError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools.base import Tool

FINAL_ANSWER_S = 600.0
"""The time for the final question once the run's own is up; less if a deadline is near."""
NUDGE_TOKENS = 48
"""HOLD_CHARS in tokens: the prose that a nudged turn may contain before its call."""
MAX_TURNS_WITHOUT_WORK = 2
"""After so many turns in which no call could be run, the request is sent without tools."""


class AgentLoop:
    """One run, from the first model call to the Result."""

    def __init__(
        self,
        model: Model,
        windows: ContextWindows,
        tools: Sequence[Tool],
        equipment: SandboxContents,
        task: AgentTask,
        given: AgentInput,
        emit: Emit,
        lease: WorkspaceLease,
        watch: EgressWatch,
        clock: RunClock,
    ) -> None:
        profile = task.profile
        self._style = style_of(profile)
        self._task, self._given = task, given
        self._emit, self._seat, self._watch = emit, lease, watch
        self._use, self._outcome = CapabilityUse(), RunOutcome()
        self._times = time_plan(profile.limits.wall_time_s, clock.deadline_s)
        self._limits = replace(profile.limits, wall_time_s=self._times.work_s)
        self._outputs = ArtifactCollector(given.files, profile.artifacts.max_file_mib << 20)
        self._guard = Guard(profile, emit)
        self._client_names = [tool_name(tool) for tool in task.request.client_tools]
        self._toolbox = ToolExecutor(
            *(tools, lease, emit, self._guard, given.files),
            prepare=self._prepare,
            keep_warm=model.keep_warm,
            taken=self._client_names,
            max_calls=task.request.max_tool_calls,
        )
        self.budget = RunBudget(task, self._limits, clock.began)
        self._begin(model, windows, equipment)
        self._nudged = False
        """Whether the model was asked for a call that it had announced."""
        self._plainly = False
        """Whether the next turn is the last one: the client's request as it came, no tools."""
        self._turns_without_work = 0

    def _begin(self, model: Model, windows: ContextWindows, equipment: SandboxContents) -> None:
        """Create the parts that talk to the model and to the client."""
        task, emit = self._task, self._emit
        words = self._style.words(task.profile, equipment, self._toolbox.names)
        self._prompt = hashlib.sha256(words.encode()).hexdigest() if words else ""
        schemas = self._toolbox.schemas_but("submit" if task.request.must_call else "")
        files = ObservationFiles(task.run_id, self._computer)
        window = ContextWindow(windows, model, task.session.owner, task.model)
        paying = MeteredModel(model, self.budget, self._limits.model_timeout_s)
        told = self._style.messages(task, self._given), self._style.params(task)
        self._talk = Conversation(paying, task, *told, schemas, words, window, files)
        self._talk.has_worked = task.session.suspended_run is not None or not self._style.prose_ends
        rewrites = task.request.rewrite_links
        self._writer = AnswerWriter(emit, task.artifact_store, task.profile, rewrite_links=rewrites)
        self._rules = UNCHECKED
        if self._style.prose_ends:
            self._rules = prose_rules(task, self._given.messages, words, schemas)
        self._first_call = FirstCall(task.delivery.status_hold, emit)
        self._call_ids = (f"call_{task.run_id}_{n}" for n in itertools.count(1))
        self._calls = CallRunner(
            *(self._toolbox, self._talk, self.budget, self._outcome, self._use),
            limits=self._limits,
            client_names=self._client_names,
        )

    async def go(self) -> Result:
        await self._emit(RunStarted(self._task.run_id, self._prompt))
        stop = None
        while stop is None:
            stop = await self._before_turn()
            stop = stop or await self._turn()
        stop = await self._last_chance(stop)
        if stop is StopReason.WALL_TIME:
            stop = self._times.stop
        asks = self._limits.final_question and not self._outcome.has_cut_call
        if asks and self._task.request.must_call and stop in WHY_NO_MORE_TOOLS:
            stop = await self._calls.ask_for(stop, self._call_ids, self._final_question_s())
        answer = await self._best_answer(stop)
        await self._writer.finish(answer, self._toolbox.computer)
        if self._outcome.refusal:
            await self._emit(Refused(self._outcome.refusal))
        return await self._result(stop, answer)

    async def _before_turn(self) -> StopReason | None:
        """Return the limit that leaves no room for a turn; the plain turn always has room."""
        if self._plainly:
            return None
        talk = self._talk
        return await self.budget.before_turn(talk.history.messages, talk.trajectory_tokens())

    async def _last_chance(self, stop: StopReason) -> StopReason:
        """Run the plain turn if a limit ended the run before a tool ran and before the model said
        anything. Return why the run ends. Raises OutOfTimeError if the time is up."""
        outcome = self._outcome
        has_answer = outcome.prose or outcome.prose_reply or outcome.has_cut_call
        if (
            stop not in WHY_NO_MORE_TOOLS
            or has_answer
            or self._has_worked
            or self._task.request.must_call
        ):
            return stop
        again: StopReason | None = stop
        if stop is not StopReason.WALL_TIME:
            self._plainly = True
            again = await self._turn()
        if again is StopReason.WALL_TIME and not (outcome.prose or outcome.has_cut_call):
            raise out_of_time(self._task)
        return again if again in (StopReason.CLIENT_TOOL_CALLS, StopReason.REFUSED) else stop

    async def _best_answer(self, stop: StopReason) -> str:
        asks = (self._task, self._talk, self._writer, self._toolbox, self._emit)
        call = FinalCall(*asks, self._first_call, self._rules)
        seconds = self._final_question_s() if self._limits.final_question else None
        takes_prose = self._style.prose_ends
        best = BestAnswer(self._task, self._outcome, call, seconds, takes_prose=takes_prose)
        return await best.find(
            stop, self._toolbox.computer, has_worked=self._has_worked, is_plain=self._plainly
        )

    def _final_question_s(self) -> float:
        return min(FINAL_ANSWER_S, max(0.001, self._times.answer_s - self.budget.wall_time_s))

    @property
    def _has_worked(self) -> bool:
        """True once a tool has run. Until then the answer is the model's own, as without tools."""
        return self._talk.has_worked

    async def _prepare(self, computer: Sandbox) -> Mapping[str, str]:
        """Make a sandbox ready for this run. Return the client's files that are in it already."""
        self.budget.watch(computer.traffic)
        if not self._seat.goes_on:
            return {}
        waited = self._task.session.suspended_run
        if waited is None or not waited.began:
            await remove_answer_files(computer)
        await self._outputs.begin(computer, self.budget.time_left_s)
        return await read_manifest(computer)

    async def _computer(self) -> Sandbox | None:
        """Return the sandbox in use; a run that is resumed gets its own back here at the latest."""
        waited = self._task.session.suspended_run
        if waited and waited.began and not self._toolbox.is_begun:
            with suppress(SandboxError, TimeoutError):  # the next command fails for it
                async with asyncio.timeout(self.budget.time_left_s):
                    await self._toolbox.sandbox()
        return self._toolbox.computer

    def _turn_time_s(self) -> float:
        """Return the seconds that a turn may take. Before a tool has run, the turn also gets the
        time that is kept for the final question, which is then not asked."""
        if self._has_worked:
            return self.budget.time_left_s
        until_s = min(self._times.answer_s, self._limits.wall_time_s + FINAL_ANSWER_S)
        return max(0.001, until_s - self.budget.wall_time_s)

    # One turn

    async def _turn(self) -> StopReason | None:
        left = self._limits.max_turns - self.budget.turns
        self._style.before_turn(self._talk.history, left)
        self.budget.turns += 1
        self._use.begin_turn()
        await self._emit(TurnStarted(self.budget.turns))
        await self._writer.begin()
        async with self._listener() as listener:
            try:
                async with asyncio.timeout(self._turn_time_s()):
                    ask = self._talk.ask_plainly if self._plainly else self._talk.ask
                    reply = await ask(listener.hear)
            except TimeoutError:
                self._outcome.has_cut_call = listener.has_begun_client_call
                return self._out_of_time(listener.prose.text.strip())
            except (ContextOverflowError, ToolsRefusedError) as error:
                if listener.has_begun_client_call:
                    raise
                return self._refused(error)
            return await self._end_turn(listener, reply)

    def _listener(self) -> StreamHandler:
        task = self._task
        shows = when_shown(task)
        prose = Prose(self._rules, ends_at_echo=not self._has_worked)
        if self._plainly:
            prose, shows = Prose(ProseRules()), "at once"
        elif self._nudged and not self._has_worked:
            prose, shows = Prose(self._rules, max_chars=HOLD_CHARS), "never"
        streams = task.request.stream and self._style.prose_ends
        calls = (task, self._emit, self._toolbox, self._client_names, self._call_ids)
        return StreamHandler(
            *(self._emit, self._first_call, self._writer, self._toolbox, prose),
            streams=task.request.stream,
            shows=shows if streams else "never",
            shows_submit=streams and not task.params.final,
            client_calls=client_call_stream(*calls) if streams else None,
            tools=self._client_names if self._plainly else None,
        )

    def _refused(self, error: BackendError) -> StopReason | None:
        """Return why the run ends after a refusal of tools or length, or None if it goes on."""
        is_refusal = isinstance(error, ToolsRefusedError)
        insists = self._has_worked or self._task.profile.computer == "always"
        if self._plainly or (is_refusal and insists):
            raise error
        if self._has_worked:
            if self.budget.turns == 1:
                raise error  # the request itself is too long
            return StopReason.CONTEXT_WINDOW
        if self._outcome.prose:
            return StopReason.ANSWERED
        if is_refusal:
            self._outcome.route = "tools_refused"
            self._outcome.warnings = (RunWarning("tools_refused", error.message),)
        self._plainly = True
        return None

    def _out_of_time(self, said: str) -> StopReason:
        """Keep what the model `said` before its time was up."""
        outcome = self._outcome
        outcome.reply = self._talk.unfinished or outcome.reply
        if said and not outcome.announced and self._style.prose_ends:
            outcome.prose = said
            outcome.prose_reply = None if self._has_worked else self._talk.unfinished
        return StopReason.WALL_TIME

    async def _end_turn(self, listener: StreamHandler, reply: Completion) -> StopReason | None:
        self._outcome.reply = reply
        names = self._client_names if self._plainly else [*self._toolbox.names, *self._client_names]
        turn = self._style.understand(reply.message, names, self._call_ids)
        if self._plainly:
            self._talk.history.begin_again()
            turn = only_of(turn, names)
        is_echo = not self._plainly and listener.prose.is_echo_at_end()
        if reply.stopped == "echo" or (is_echo and not turn.calls):
            return self._echoed()
        self._talk.history.append(turn.message)
        if turn.calls:
            self._outcome.note_narration(turn, reply, is_echo=is_echo)
            self._outcome.sent_ids = await listener.end_with_calls(turn, reply)
            return await self._act(turn, reply)
        is_answer = self._is_answer(reply)
        await listener.end_without_calls(reply, is_answer=is_answer)
        return self._without_calls(reply, is_answer=is_answer)

    def _echoed(self) -> StopReason | None:
        """Discard a reply that repeats the proxy's own texts: the plain turn follows, unless an
        answer is there."""
        self._outcome.note("echo")
        if self._has_worked or self._outcome.announced:
            return StopReason.ANSWERED
        self._plainly = True
        return None

    def _is_answer(self, reply: Completion) -> bool:
        """Note the prose of a turn without tool calls. Return True if the turn ends the run."""
        outcome = self._outcome
        if reply.stopped == "runaway":
            outcome.note("runaway")
        if not self._style.prose_ends:
            prose = text_of(reply.message).strip()
            outcome.prose, outcome.prose_reply = prose or outcome.prose, None
            if is_answer(prose, "stop"):
                outcome.prose_reply = reply
            return False
        if outcome.announced and not self._has_worked:
            return True  # what was announced is not called: the announcement is the answer
        prose = text_of(reply.message)
        if not self._plainly:
            prose = prose.strip()
        ends = self._nudged or self._is_done(prose, reply)
        if prose or (ends and not self._has_worked):
            outcome.prose = prose
            outcome.prose_reply = reply if ends or is_answer(prose, "stop") else None
        return ends

    def _is_done(self, prose: str, reply: Completion) -> bool:
        if self._plainly or reply.stopped is not None:
            return True
        if not self._has_worked and reply.finish_reason in ("length", "content_filter"):
            return True
        return is_answer(prose, reply.finish_reason)

    def _without_calls(self, reply: Completion, *, is_answer: bool) -> StopReason | None:
        """Return why a turn without tool calls ends the run, or None if another turn follows."""
        outcome = self._outcome
        if refusal := refusal_of(reply.message):
            outcome.refusal, outcome.choice = refusal, reply.choice
            outcome.finish_reason = reply.finish_reason
            return StopReason.REFUSED
        if is_answer:
            return StopReason.ANSWERED
        if not self._has_worked and not self._task.request.must_call:
            if not outcome.prose:
                self._plainly = True
                return None
            outcome.prose_reply = reply
            limit, spent = self._rules.max_tokens, tokens(self._talk.usage, "completion_tokens")
            if limit is not None and spent + NUDGE_TOKENS > limit:
                return StopReason.ANSWERED  # no room for the call that was announced
            outcome.announced = outcome.prose
        self._nudged = True
        self._talk.history.ask(self._style.no_call)
        return None

    async def _act(self, turn: Turn, reply: Completion) -> StopReason | None:
        """Run the tool calls of a turn. Return why the run ends, or None."""
        self._nudged = False
        outcome = self._outcome
        if outcome.announced and when_shown(self._task) == "never":
            await self._emit(Narration(outcome.announced))
        outcome.announced = ""
        stop = await self._calls.run(turn, reply)
        if stop is None and not self._has_worked:  # no call of the turn could be run
            outcome.note("malformed_call")
            self._turns_without_work += 1
            self._plainly = self._turns_without_work >= MAX_TURNS_WITHOUT_WORK
        return stop

    async def _result(self, stop: StopReason, answer: str) -> Result:
        collected = await self._collect()
        if stop is not StopReason.CLIENT_TOOL_CALLS and not self._outcome.refusal:
            await self._writer.list_files(collected.artifacts)
        await self._watch.tell_open()
        await self._emit(RunFinished(stop, self._talk.usage))
        reply = self._outcome.reply
        calls = client_tool_calls(self._task, self._outcome, self._call_ids)
        began = self._toolbox.computer is not None
        legacy_state = self._task.request.legacy_state
        return Result(
            run_id=self._task.run_id,
            container_id=self._task.artifact_store.container_id,
            model=self._task.model,
            answer=self._writer.text,
            streamed_before=self._writer.streamed_before,
            stop_reason=stop,
            finish_reason=self._outcome.finish_reason_of(stop, answer, legacy_state),
            tool_calls=calls,
            usage=self._talk.usage_of(self._task.delivery.usage_of),
            usages=self._talk.usages,
            segments=len(self._talk.compactions) + 1,
            compactions=self._talk.compactions,
            stats=stats_of(self._given, self._talk, self.budget, self._toolbox, self._use),
            artifacts=collected.artifacts,
            skipped_files=collected.skipped_files,
            choice=self._outcome.choice,
            response=reply.response if reply else {},
            refusal=self._outcome.refusal,
            warnings=(*self._outcome.warnings, *collected.warnings),
            tool_trouble=tuple(self._outcome.trouble),
            origin=self._seat.origin,
            route=self._outcome.route or self._task.route,
            steps=self._toolbox.shown_steps,
            parked=parked_run(self._task, self._outcome, calls, self._talk.history, began=began),
        )

    async def _collect(self) -> CollectedArtifacts:
        """Take the produced files out of the sandbox, if the run has used one. If it is lost by
        then, the answer is there all the same."""
        if self._toolbox.computer is None:
            return CollectedArtifacts()
        linked = await self._writer.dead_links()
        parts = (self._toolbox.computer, self._outputs, linked, self._task, self._guard, self._emit)
        seconds = self._times.collection_time_s(self.budget.wall_time_s)
        try:
            return await collect_artifacts(*parts, seconds)
        except SandboxLostError:
            self._toolbox.computer = None
            return CollectedArtifacts(warnings=(SANDBOX_LOST,))


def stats_of(
    given: AgentInput,
    talk: Conversation,
    budget: RunBudget,
    toolbox: ToolExecutor,
    use: CapabilityUse,
) -> RunStats:
    """Return what a run has cost."""
    said = talk.trajectory
    return RunStats(
        llm_calls=said.llm_calls,
        turns=budget.turns,
        tool_calls=toolbox.steps,
        commands=budget.commands,
        context_tokens=said.context_tokens,
        env_tokens=said.env_tokens,
        trajectory_tokens=said.tokens,
        documents_tokens=given.documents_tokens,
        documents_tokens_saved=given.documents_tokens * said.llm_calls,
        cost_usd=budget.cost_usd,
        cpu_ms=int(budget.cpu_s * 1000),
        peak_mem_bytes=toolbox.peak_memory_bytes,
        egress_bytes=budget.egress_bytes,
        capability_turns=use.turns,
        **token_counts(talk.usage),
        **times(
            wall_s=budget.wall_time_s,
            model_s=talk.waited.spent_s,
            sandbox_s=toolbox.waited.spent_s,
        ),
    )
