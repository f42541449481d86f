"""The agent loop: call the model, run its tool calls and append the observations, until a turn ends
the run or a limit is reached; then determine the answer and build the Result."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import anyio

from policies.answer_form import is_answer
from policies.limits import StopReason, time_plan
from policies.prompts import WHY_NO_MORE_TOOLS, SandboxContents
from proxy.agent.answer import AnswerWriter, read_answer_file
from proxy.agent.artifacts import (
    SANDBOX_LOST,
    ArtifactCollector,
    CollectedArtifacts,
    collect_artifacts,
    read_manifest,
    remove_answer_files,
)
from proxy.agent.budget import RunBudget
from proxy.agent.capture import model_of_run
from proxy.agent.checkpoint import MAX_CALLS_OF_TURN, Checkpoint
from proxy.agent.context import ObservationFiles
from proxy.agent.context_windows import ContextWindow, ContextWindows
from proxy.agent.conversation import Conversation
from proxy.agent.events import Emit, ModelRefused, Narration, RunFinished, RunStarted, TurnStarted
from proxy.agent.final_answer import BestAnswerFinder, FinalAnswerCall
from proxy.agent.guard import EgressWatch, Guard
from proxy.agent.history import text_of
from proxy.agent.model import Completion, Model, refusal_of
from proxy.agent.prose import HOLD_CHARS, UNCHECKED_RULES, Prose, ProseRules
from proxy.agent.result import (
    CapabilityCounter,
    Result,
    RunOutcome,
    RunStats,
    RunWarning,
    run_times,
    token_counts,
    usage_count,
)
from proxy.agent.status_hold import FirstCallProgress
from proxy.agent.styles import style_of
from proxy.agent.suspended_run import new_call_ids
from proxy.agent.suspension import suspend_run
from proxy.agent.task import AgentInput, AgentTask, RunClock, out_of_time_error
from proxy.agent.tool_calls import Turn, keep_calls_of
from proxy.agent.tools import CallRunner, ToolExecutor, tool_name
from proxy.agent.turn_stream import (
    StreamHandler,
    client_call_stream,
    prose_rules,
    prose_visibility,
)
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.workspaces import RunWorkspace
from sandbox_runtime.errors import SandboxError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools.base import Tool

FINAL_ANSWER_S = 600.0
"""Maximum duration of the final-answer call, in seconds; shorter if a client's deadline is near."""
NUDGE_TOKENS = 48
"""The proxy asks for a tool call that the model announced only if this many tokens are left: about
the tokens of HOLD_CHARS characters, which is the most prose that the reply may contain."""
MAX_KEPT_ANSWER_CHARS = 64 << 10
"""Maximum length of an answer file that is stored with a suspended run."""
TAKEN_OVER = RunWarning(
    "run_taken_over",
    "The server of this request's first run ended before there was a result. Another server has"
    " gone on in the same sandbox.",
)
MAX_FAILED_TURNS = 2
"""Number of turns in which none of the tool calls could be run, after which the plain turn
follows."""


class AgentLoop:
    """One run, from the first model call to the Result.

    A *plain turn* sends the client's own request, without the proxy's prompt and tools. It is the
    last resort for a model that cannot use the tools. No other turn follows it.
    """

    def __init__(
        self,
        model: Model,
        windows: ContextWindows,
        tools: Sequence[Tool],
        sandbox_contents: SandboxContents,
        task: AgentTask,
        agent_input: AgentInput,
        emit: Emit,
        lease: RunWorkspace,
        egress_watch: EgressWatch,
        clock: RunClock,
    ) -> None:
        profile = task.profile
        self._style = style_of(profile)
        self._task, self._input = task, agent_input
        self._emit, self._lease, self._egress_watch = emit, lease, egress_watch
        self._capability_counter, self._outcome = CapabilityCounter(), RunOutcome()
        self._time_plan = time_plan(profile.limits.max_run_seconds, clock.deadline_s)
        self._limits = replace(profile.limits, max_run_seconds=self._time_plan.work_s)
        self._artifact_collector = ArtifactCollector(
            agent_input.files, profile.artifacts.max_file_mib << 20
        )
        self._guard = Guard(profile, emit)
        self._client_tool_names = [tool_name(tool) for tool in task.request.client_tools]
        self._executor = ToolExecutor(
            tools,
            lease,
            emit,
            self._guard,
            agent_input.files,
            prepare=self._prepare_sandbox,
            keep_warm=model.keep_warm,
            client_tool_names=self._client_tool_names,
            max_calls=task.request.max_tool_calls,
        )
        self.budget = RunBudget(task, self._limits, clock.started_at)
        self._create_collaborators(model, windows, sandbox_contents)
        self._was_nudged = False
        """True if the last turn made no tool call and the model was asked to make one."""
        self._is_plain_turn = False
        """True if the next turn is the plain turn. Always False in a run that captures tokens."""
        self._failed_turns = 0

    def _create_collaborators(
        self, model: Model, windows: ContextWindows, sandbox_contents: SandboxContents
    ) -> None:
        """Create the objects that call the model and stream to the client."""
        task, emit = self._task, self._emit
        prompt = self._style.system_prompt(task.profile, sandbox_contents, self._executor.names)
        self._prompt_sha256 = hashlib.sha256(prompt.encode()).hexdigest() if prompt else ""
        schemas = self._executor.schemas_except("submit" if task.request.must_call else "")
        files = ObservationFiles(task.run_id, self._acquire_resumed_sandbox)
        window = ContextWindow(windows, model, task.session.owner, task.model)
        metered = model_of_run(model, self.budget, task, emit, self._limits.model_timeout_s)
        messages, params = self._style.messages(task, self._input), self._style.params(task)
        self._conversation = Conversation(
            metered, task, messages, params, schemas, prompt, window, files
        )
        self._conversation.has_used_tools = (
            task.session.suspended_run is not None or not self._style.accepts_prose
        )
        self._writer = AnswerWriter(task, emit)
        self._prose_rules = UNCHECKED_RULES
        if self._style.accepts_prose and not task.captures_tokens:
            self._prose_rules = prose_rules(task, self._input.messages, prompt, schemas)
        self._first_call_progress = FirstCallProgress(task.delivery.status_hold, emit)
        self._new_ids = new_call_ids(task.run_id)
        self._call_runner = CallRunner(
            self._executor,
            self._conversation,
            self.budget,
            self._outcome,
            self._capability_counter,
            limits=self._limits,
            client_tool_names=self._client_tool_names,
        )

    async def run(self) -> Result:
        """Run turns until the run ends, and return the Result. Raises BackendError, SandboxError,
        OutOfTimeError."""
        await self._emit(RunStarted(self._task.run_id, self._prompt_sha256))
        return await self._run_from(None)

    async def run_from_checkpoint(self, sandbox: Sandbox) -> Result:
        """Continue from the task's checkpoint in `sandbox`, which was adopted from the dead server,
        and return the Result. Raises the same errors as `run`."""
        checkpoint = self._task.checkpoint
        assert checkpoint
        state = checkpoint.state
        self.budget.restore(state["budget"])
        self.budget.track_traffic(sandbox.traffic)
        self._conversation.restore(state["conversation"])
        self._executor.restore(state["executor"], sandbox)
        self._artifact_collector.restore(state["artifacts"])
        self._capability_counter.turns.update(state["capabilities"])
        self._outcome.prose, self._outcome.trouble = state["prose"], list(state["trouble"])
        self._outcome.warnings = (TAKEN_OVER,)
        self._outcome.reply = checkpoint.reply
        await self._emit(RunStarted(self._task.run_id, self._prompt_sha256))
        self._capability_counter.begin_turn()
        await self._emit(TurnStarted(self.budget.turns))
        await self._writer.begin_answer()
        return await self._run_from(await self._run_calls(checkpoint.turn, checkpoint.reply))

    async def _run_from(self, stop: StopReason | None) -> Result:
        """Run turns until there is a stop reason, and return the Result."""
        while stop is None:
            stop = await self._reserve_turn()
            stop = stop or await self._run_turn()
        stop = await self._fall_back_to_plain_turn(stop)
        if stop is StopReason.WALL_TIME:
            stop = self._time_plan.stop_reason
        may_ask = self._limits.final_question and not self._outcome.has_cut_call
        if may_ask and self._task.request.must_call and stop in WHY_NO_MORE_TOOLS:
            stop = await self._call_runner.require_client_call(
                stop, self._new_ids, self._final_answer_timeout_s()
            )
        has_no_answer = stop in (StopReason.CLIENT_TOOL_CALLS, StopReason.REFUSED)
        if has_no_answer or self._outcome.has_cut_call:  # nothing can follow the call in the stream
            answer = ""
        else:
            answer = await self._best_answer(stop)
        await self._writer.finish(answer, self._executor.current_sandbox)
        if self._outcome.refusal:
            await self._emit(ModelRefused(self._outcome.refusal))
        return await self._build_result(stop, answer)

    async def _reserve_turn(self) -> StopReason | None:
        """Reserve the model call of the next turn. Return the limit that rules the turn out, or
        None. No limit rules out the plain turn."""
        if self._is_plain_turn:
            return None
        messages = self._conversation.history.messages
        return await self.budget.reserve_turn(messages, self._conversation.trajectory_tokens())

    async def _run_turn(self) -> StopReason | None:
        """Run one turn. Return the stop reason, or None if another turn follows."""
        turns_left = self._limits.max_turns - self.budget.turns
        self._style.prepare_turn(self._conversation.history, turns_left)
        self.budget.turns += 1
        self._capability_counter.begin_turn()
        await self._emit(TurnStarted(self.budget.turns))
        await self._writer.begin_answer()
        complete = self._conversation.complete_turn
        if self._is_plain_turn:
            complete = self._conversation.complete_plain_turn
        async with self._stream_handler() as handler:
            try:
                async with asyncio.timeout(self._turn_timeout_s()):
                    reply = await complete(handler.on_delta)
            except TimeoutError:
                self._outcome.has_cut_call = handler.has_begun_client_call
                return self._handle_timeout(handler.prose.text.strip())
            except (ContextOverflowError, ToolsRefusedError) as error:
                if handler.has_begun_client_call:
                    raise
                return self._handle_refused_request(error)
            return await self._handle_reply(handler, reply)

    def _turn_timeout_s(self) -> float:
        """Return the timeout of a turn, in seconds. Until a tool has run, the turn's prose can be
        the answer, so the turn also gets the time reserved for the final-answer call."""
        if self._has_used_tools:
            return self.budget.time_left_s
        until_s = min(self._time_plan.answer_s, self._limits.max_run_seconds + FINAL_ANSWER_S)
        return max(0.001, until_s - self.budget.wall_time_s)

    def _stream_handler(self) -> StreamHandler:
        task = self._task
        visibility = prose_visibility(task)
        prose = Prose(self._prose_rules, ends_at_echo=not self._has_used_tools)
        if self._is_plain_turn:
            prose, visibility = Prose(ProseRules()), "at once"
        elif self._was_nudged and not self._has_used_tools:
            prose, visibility = Prose(self._prose_rules, max_chars=HOLD_CHARS), "never"
        streams = task.request.stream and self._style.accepts_prose
        call_stream = None
        if streams:
            call_stream = client_call_stream(
                task, self._emit, self._executor, self._client_tool_names, self._new_ids
            )
        return StreamHandler(
            self._emit,
            self._first_call_progress,
            self._writer,
            self._executor,
            prose,
            streams=task.request.stream,
            visibility=visibility if streams else "never",
            shows_submit=streams and not task.params.final,
            client_calls=call_stream,
            allowed_tools=self._client_tool_names if self._is_plain_turn else None,
        )

    async def _handle_reply(self, handler: StreamHandler, reply: Completion) -> StopReason | None:
        """Append the reply to the history, and run its tool calls or record its prose. Return the
        stop reason, or None if another turn follows."""
        self._outcome.reply = reply
        names = self._client_tool_names
        if not self._is_plain_turn:
            names = [*self._executor.names, *names]
        turn = self._style.parse_turn(reply.message, names, self._new_ids)
        if self._is_plain_turn:
            self._conversation.history.drop_run_messages()
            turn = keep_calls_of(turn, names)
        is_echo = not self._is_plain_turn and handler.prose.is_echo_at_end()
        if reply.stop_cause == "echo" or (is_echo and not turn.calls):
            return self._discard_echo()
        self._conversation.append_reply(reply, turn.message)
        if turn.calls:
            self._outcome.record_narration(turn, reply, is_echo=is_echo)
            self._outcome.client_ids_by_model_id = await handler.end_with_calls(turn, reply)
            return await self._run_calls(turn, reply)
        is_answer = self._record_prose(reply)
        await handler.end_without_calls(reply, is_answer=is_answer)
        return self._stop_reason_without_calls(reply, is_answer=is_answer)

    async def _run_calls(self, turn: Turn, reply: Completion) -> StopReason | None:
        """Run the tool calls of a turn. Return the stop reason, or None if another turn follows."""
        self._was_nudged = False
        outcome = self._outcome
        if outcome.announcement and prose_visibility(self._task) == "never":
            await self._emit(Narration(outcome.announcement))
        outcome.announcement = ""
        if self._task.save_checkpoint:
            await self._save_checkpoint(turn, reply)
        stop = await self._call_runner.run_calls(turn, reply)
        if stop is None and not self._has_used_tools:  # none of the calls could be run
            outcome.record_trouble("malformed_call")
            self._failed_turns += 1
            has_failed = self._failed_turns >= MAX_FAILED_TURNS
            self._is_plain_turn = has_failed and not self._task.captures_tokens
        return stop

    async def _save_checkpoint(self, turn: Turn, reply: Completion) -> None:
        """Store a checkpoint before the calls of a turn. If the turn cannot have a checkpoint,
        remove the one of an earlier turn, because a run that continues from it would repeat
        later commands."""
        save, earlier = self._task.save_checkpoint, self._task.checkpoint
        assert save
        is_repeated = earlier is not None and turn is earlier.turn
        self._executor.begin_turn()
        names = {call.name for call in turn.calls}
        if not any(
            name in self._executor.names and not self._executor.is_submit(name) for name in names
        ):
            return  # nothing can run twice
        sandbox = None
        if len(turn.calls) <= MAX_CALLS_OF_TURN and not names & set(self._client_tool_names):
            sandbox = await self._sandbox_for_checkpoint()
        reference = sandbox.reference() if sandbox else None
        if sandbox is None or reference is None:
            await save(None)
            return
        history = self._conversation.history
        checkpoint = Checkpoint(
            sandbox=reference,
            turn=turn,
            reply=replace(reply, choice={}),
            messages=history.messages,
            run_start_index=history.run_start_index,
            message_kinds=history.message_kinds,
            wall_time_s=self.budget.wall_time_s,
            state={
                "budget": self.budget.state(),
                "conversation": self._conversation.state(),
                "executor": self._executor.state(),
                "artifacts": self._artifact_collector.state(),
                "capabilities": self._capability_counter.turns,
                "prose": self._outcome.prose,
                "trouble": self._outcome.trouble,
            },
        )
        if earlier and is_repeated:
            checkpoint = replace(checkpoint, command_prefix=earlier.command_prefix)
        is_stored = await save(checkpoint)
        if is_stored:
            sandbox.forget_results()
        prefix = checkpoint.command_prefix if is_stored or is_repeated else ""
        self._executor.begin_turn(prefix, is_repeated=is_repeated)

    async def _sandbox_for_checkpoint(self) -> Sandbox | None:
        """Return the run's sandbox, which is started if necessary, or None if there is none."""
        with suppress(SandboxError, TimeoutError):  # the first call reports the failure
            async with asyncio.timeout(self.budget.time_left_s):
                return await self._executor.sandbox()
        return None

    def _record_prose(self, reply: Completion) -> bool:
        """Record the prose of a turn without tool calls. Return True if the turn ends the run."""
        outcome = self._outcome
        if reply.stop_cause == "runaway":
            outcome.record_trouble("runaway")
        if not self._style.accepts_prose:
            prose = text_of(reply.message).strip()
            outcome.prose, outcome.prose_reply = prose or outcome.prose, None
            if is_answer(prose, "stop"):
                outcome.prose_reply = reply
            return False
        if outcome.announcement and not self._has_used_tools:
            return True  # the announced call was not made: the announcement is the answer
        prose = text_of(reply.message)
        if not self._is_plain_turn:
            prose = prose.strip()
        ends = self._was_nudged or self._is_final_prose(prose, reply)
        if prose or (ends and not self._has_used_tools):
            outcome.prose = prose
            outcome.prose_reply = reply if ends or is_answer(prose, "stop") else None
        return ends

    def _is_final_prose(self, prose: str, reply: Completion) -> bool:
        if self._is_plain_turn or reply.stop_cause is not None:
            return True
        if not self._has_used_tools and reply.finish_reason in ("length", "content_filter"):
            return True
        return is_answer(prose, reply.finish_reason)

    def _stop_reason_without_calls(
        self, reply: Completion, *, is_answer: bool
    ) -> StopReason | None:
        """Return the stop reason after a turn without tool calls; None if another turn follows."""
        outcome = self._outcome
        if refusal := refusal_of(reply.message):
            outcome.refusal, outcome.choice = refusal, reply.choice
            outcome.finish_reason = reply.finish_reason
            return StopReason.REFUSED
        if is_answer:
            return StopReason.ANSWERED
        protects = not (self._has_used_tools or self._task.captures_tokens)
        if protects and not self._task.request.must_call:
            if not outcome.prose:
                self._is_plain_turn = True
                return None
            outcome.prose_reply = reply
            limit = self._prose_rules.max_tokens
            spent = usage_count(self._conversation.usage, "completion_tokens")
            if limit is not None and spent + NUDGE_TOKENS > limit:
                return StopReason.ANSWERED  # no room for the call that was announced
            outcome.announcement = outcome.prose
        self._was_nudged = True
        self._conversation.history.append_request(self._style.request_for_missing_call)
        return None

    def _discard_echo(self) -> StopReason | None:
        """Discard a reply that repeats the proxy's own texts. Return None if the plain turn
        follows, because no tool has run and the model has announced no tool call. Else return the
        stop reason."""
        self._outcome.record_trouble("echo")
        if self._has_used_tools or self._outcome.announcement:
            return StopReason.ANSWERED
        self._is_plain_turn = True
        return None

    def _handle_refused_request(self, error: BackendError) -> StopReason | None:
        """Handle a request that the backend refused because of its tools or its length. Return the
        stop reason, or None if the plain turn follows. Raises the error if there is no fallback."""
        is_refusal = isinstance(error, ToolsRefusedError)
        insists = self._has_used_tools or self._task.profile.enabled == "always"
        if self._is_plain_turn or (is_refusal and (insists or self._task.captures_tokens)):
            raise error
        if self._has_used_tools or self._task.captures_tokens:
            if self.budget.turns == 1:
                raise error  # the request itself is too long
            return StopReason.CONTEXT_WINDOW
        if self._outcome.prose:
            return StopReason.ANSWERED
        if is_refusal:
            self._outcome.route = "tools_refused"
            self._outcome.warnings = (RunWarning("tools_refused", error.message),)
        self._is_plain_turn = True
        return None

    def _handle_timeout(self, prose: str) -> StopReason:
        """Record the prose that the model wrote before the timeout. Return the stop reason."""
        outcome = self._outcome
        outcome.reply = self._conversation.partial_completion or outcome.reply
        if prose and not outcome.announcement and self._style.accepts_prose:
            outcome.prose = prose
            if self._has_used_tools:
                outcome.prose_reply = None
            else:
                outcome.prose_reply = self._conversation.partial_completion
        return StopReason.WALL_TIME

    async def _fall_back_to_plain_turn(self, stop: StopReason) -> StopReason:
        """Run the plain turn if a limit ended the run before any tool ran and before the model
        wrote any prose. Do not run it if that limit was the time, if the run captures tokens, or if
        the run has to end in a client tool call. Return the stop reason. Raises OutOfTimeError if
        the time is up before there is an answer."""
        outcome = self._outcome
        has_answer = outcome.prose or outcome.prose_reply or outcome.has_cut_call
        if (
            stop not in WHY_NO_MORE_TOOLS
            or has_answer
            or self._has_used_tools
            or self._task.request.must_call
        ):
            return stop
        last: StopReason | None = stop
        if stop is not StopReason.WALL_TIME:
            if self._task.captures_tokens:
                return stop
            self._is_plain_turn = True
            last = await self._run_turn()
        if last is StopReason.WALL_TIME and not (outcome.prose or outcome.has_cut_call):
            raise out_of_time_error(self._task)
        return last if last in (StopReason.CLIENT_TOOL_CALLS, StopReason.REFUSED) else stop

    async def _best_answer(self, stop: StopReason) -> str:
        call = FinalAnswerCall(
            self._task,
            self._conversation,
            self._writer,
            self._executor,
            self._emit,
            self._first_call_progress,
            self._prose_rules,
        )
        seconds = self._final_answer_timeout_s() if self._limits.final_question else None
        takes_prose = self._style.accepts_prose
        best = BestAnswerFinder(
            self._task,
            self._outcome,
            call,
            seconds,
            takes_prose=takes_prose,
            earlier_answer=self._answer_before_suspension(),
        )
        return await best.find(
            stop,
            self._executor.current_sandbox,
            has_used_tools=self._has_used_tools,
            is_plain=self._is_plain_turn,
        )

    def _final_answer_timeout_s(self) -> float:
        return min(FINAL_ANSWER_S, max(0.001, self._time_plan.answer_s - self.budget.wall_time_s))

    @property
    def _has_used_tools(self) -> bool:
        """True once a tool has run, and always in a resumed run and in the reference style. Until
        then, the run answers as the bare model would."""
        return self._conversation.has_used_tools

    async def _prepare_sandbox(self, sandbox: Sandbox) -> Mapping[str, str]:
        """Prepare a new sandbox for this run. Return the identities of the input files that it
        contains already, by path."""
        self.budget.track_traffic(sandbox.traffic)
        if not self._lease.has_earlier_files:
            return {}
        suspended = self._task.session.suspended_run
        if suspended is None or not suspended.used_sandbox:
            await remove_answer_files(sandbox)
        await self._artifact_collector.record_existing_files(sandbox, self.budget.time_left_s)
        return await read_manifest(sandbox)

    async def _acquire_resumed_sandbox(self) -> Sandbox | None:
        """Return the sandbox in use, or None. A resumed run acquires its sandbox here if no tool
        has done so yet."""
        suspended = self._task.session.suspended_run
        if suspended and suspended.used_sandbox and not self._executor.is_sandbox_requested:
            with suppress(SandboxError, TimeoutError):  # the next command reports the failure
                async with asyncio.timeout(self.budget.time_left_s):
                    await self._executor.sandbox()
        return self._executor.current_sandbox

    async def _build_result(self, stop: StopReason, answer: str) -> Result:
        collected = await self._collect_artifacts()
        if stop is not StopReason.CLIENT_TOOL_CALLS and not self._outcome.refusal:
            await self._writer.append_file_links(collected.artifacts)
        answer_file = await self._answer_text_to_keep()
        await self._egress_watch.flush()
        await self._emit(RunFinished(stop, self._conversation.usage))
        reply = self._outcome.reply
        self._conversation.repair_replies()  # the run that resumes might capture no tokens
        calls, suspended_run = suspend_run(
            self._task,
            self._outcome,
            self._conversation.history,
            self._new_ids,
            used_sandbox=self._executor.current_sandbox is not None,
            answer_file=answer_file,
        )
        legacy_state = self._task.request.legacy_state
        return Result(
            run_id=self._task.run_id,
            container_id=self._task.artifact_store.container_id,
            model=self._task.model,
            answer=self._writer.text,
            answer_offset=self._writer.answer_offset,
            stop_reason=stop,
            finish_reason=self._outcome.finish_reason_of(stop, answer, legacy_state),
            client_calls=calls,
            usage=self._conversation.usage_of(self._task.delivery.usage_scope),
            usages=self._conversation.usages,
            segments=len(self._conversation.compactions) + 1,
            compactions=self._conversation.compactions,
            stats=run_stats(
                self._input,
                self._conversation,
                self.budget,
                self._executor,
                self._capability_counter,
            ),
            artifacts=collected.artifacts,
            skipped_files=collected.skipped_files,
            choice=self._outcome.choice,
            response=reply.response if reply else {},
            refusal=self._outcome.refusal,
            warnings=(*self._outcome.warnings, *collected.warnings),
            tool_trouble=tuple(self._outcome.trouble),
            origin=self._lease.origin,
            route=self._outcome.route or self._task.route,
            steps=self._executor.shown_steps,
            sandbox_losses=self._executor.sandbox_losses,
            suspended_run=suspended_run,
        )

    def _answer_before_suspension(self) -> str:
        """Return the text that the answer file had when the run was suspended, or "" if the resumed
        run has requested a sandbox, which has the file itself."""
        suspended = self._task.session.suspended_run
        if suspended is None or self._executor.is_sandbox_requested:
            return ""
        return suspended.answer_file

    async def _answer_text_to_keep(self) -> str:
        """Return the text of the answer file if the run is suspended and the text is short, or
        ""."""
        if not self._outcome.client_calls:
            return ""
        if self._executor.current_sandbox is None:
            return self._answer_before_suspension()
        text = ""
        with anyio.move_on_after(self._time_plan.collection_time_s(self.budget.wall_time_s)):
            text = self._guard.redact(await read_answer_file(self._executor.current_sandbox))
        return text if len(text) <= MAX_KEPT_ANSWER_CHARS else ""

    async def _collect_artifacts(self) -> CollectedArtifacts:
        """Save the files that the run produced. A lost sandbox becomes a warning: the answer stays
        valid without its files."""
        if self._executor.current_sandbox is None:
            return CollectedArtifacts()
        linked = await self._writer.unsaved_linked_paths()
        try:
            return await collect_artifacts(
                self._executor.current_sandbox,
                self._artifact_collector,
                linked,
                self._task,
                self._guard,
                self._emit,
                self._time_plan.collection_time_s(self.budget.wall_time_s),
            )
        except SandboxLostError:
            self._executor.current_sandbox = None
            return CollectedArtifacts(warnings=(SANDBOX_LOST,))


def run_stats(
    agent_input: AgentInput,
    conversation: Conversation,
    budget: RunBudget,
    executor: ToolExecutor,
    capability_counter: CapabilityCounter,
) -> RunStats:
    """Return the statistics of a run."""
    trajectory = conversation.trajectory
    return RunStats(
        llm_calls=trajectory.llm_calls,
        turns=budget.turns,
        tool_calls=executor.steps,
        commands=budget.commands,
        context_tokens=trajectory.context_tokens,
        env_tokens=trajectory.env_tokens,
        trajectory_tokens=trajectory.tokens,
        documents_tokens=agent_input.documents_tokens,
        documents_tokens_saved=agent_input.documents_tokens * trajectory.llm_calls,
        cost_usd=budget.cost_usd,
        cpu_ms=int(budget.cpu_s * 1000),
        peak_mem_bytes=executor.peak_memory_bytes,
        egress_bytes=budget.egress_bytes,
        capability_turns=capability_counter.turns,
        **token_counts(conversation.usage),
        **run_times(
            wall_s=budget.wall_time_s,
            model_s=conversation.model_time.spent_s,
            sandbox_s=executor.tool_time.spent_s,
        ),
    )
