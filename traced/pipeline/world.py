"""A recorded target's world: made of its train conversations, and proved by replaying held-out ones in the sandbox.

Invariants: no held-out conversation enters a world. The world of a cycle is made once; its source is stored under its
hash, like that of an environment, and the stage event names the conversations that it was made of.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agents.synthesizer.builtin import MAX_WORLD_BYTES, WorldData
from agents.world.agreement import CallAgreement
from agents.world.reconstruction import read_data, with_functions, without_tools, world_source
from store.records import StageState
from store.repositories.cycles import list_stage_events
from store.repositories.environments import get_source, save_source
from traced.core.errors import StageError
from traced.evaluation.world_agreement import (
    CONTEXT_CALLS,
    HELD_OUT_CALLS,
    LEFT_OUT_CALLS,
    REPLAY,
    OmittedTool,
    WorldFigures,
    agreement_json,
    read_omitted,
    stored_figures,
    tool_agreements,
)
from traced.evaluation.world_bounds import disagreeing_tools, refuted_tools
from traced.evaluation.written_functions import WrittenFunctions, read_functions
from traced.pipeline.context import Context
from traced.pipeline.world_calls import (
    FOLDS,
    TaskTranscript,
    agreements_of,
    data_of,
    folds_of,
    replay_in_sandbox,
    replay_on_host,
    target_tools_of,
    task_transcripts,
)
from traced.pipeline.world_calls import WORLD as WORLD
from traced.pipeline.world_functions import SHOWN_FOLDS, write_functions
from traced.targets.conversation_target import HELD_OUT, TRAIN

# The sandbox loads a source of at most ``sandbox.message_kb``.
MAX_SOURCE_SHARE = 0.75
LLM = "llm"


@dataclass(frozen=True)
class TargetWorld:
    """A world of a target: its source, the source's hash, the ids of its conversations, and the tools that it omits.

    Attributes:
        functions: What a model wrote for it; None if none was asked.
    """

    digest: str
    source_code: str
    conversations: list[str]
    omitted: list[OmittedTool]
    functions: WrittenFunctions | None = None

    @property
    def module(self) -> str:
        """The module of tool functions; "" without one."""
        return self.functions.module if self.functions else ""


async def make_world(context: Context) -> TargetWorld:
    """Return the cycle's world; the first call makes it.

    Raises:
        StageError: No train conversation of the target has an answered tool call.
    """
    stored_world = find_world(context)
    if stored_world is not None:
        return stored_world
    name = context.target.name
    with context.stage(WORLD, f"Reconstruct what the tools of {name} answer") as stage:
        train = task_transcripts(context, TRAIN)
        data, used = await asyncio.to_thread(_fitting_data, context, train)
        if not train:
            raise StageError(
                f"no conversation of {name} that is not held out has an answered tool call", hint="traced import FILE"
            )
        if not used:
            raise StageError(
                f"each conversation of {name} is too large for a world in the sandbox",
                hint="raise sandbox.message_kb, or shorten what the tools answer",
            )
        omitted = await asyncio.to_thread(_omitted_tools, used, data["unstable"])
        data = without_tools(data, [item.tool for item in omitted])
        functions = None
        if context.settings.synthesis.synthesizer == LLM:
            functions = await write_functions(context, used, data["unstable"], data["omitted"])
            data = with_functions(data, functions.tools, functions.roles)
            omitted = [item for item in omitted if item.tool not in functions.tools]
        source_code = world_source(data, functions.module if functions else "")
        with context.write_session() as session:
            digest = save_source(session, source_code)
        ids = [item.transcript.trajectory_id for item in used]
        stage.detail = {
            "digest": digest,
            "conversations": ids,
            "left_out": len(train) - len(used),
            "omitted": [asdict(item) for item in omitted],
        }
        names = f", without {', '.join(item.tool for item in omitted)}" if omitted else ""
        if functions is not None:
            stage.detail["functions"] = asdict(functions)
            names += f"; {functions.text}"
        stage.figure = f"world:{digest[:12]}, of {len(used)} of {len(train)} conversations{names}"
    # Of two that were made at the same time the first one holds.
    return find_world(context) or TargetWorld(digest, source_code, ids, omitted, functions)


def find_world(context: Context) -> TargetWorld | None:
    """Return the world that the cycle has made, None if it has made none."""
    details = _details(context, WORLD)
    if not details:
        return None
    detail = details[0]
    with context.read_session() as session:
        source_code = get_source(session, detail["digest"])
    # A world of an earlier version omits no tool.
    omitted = read_omitted(detail.get("omitted", []))
    functions = read_functions(detail.get("functions"))
    return TargetWorld(detail["digest"], source_code, list(detail["conversations"]), omitted, functions)


async def prove_world(context: Context) -> WorldFigures:
    """Return the agreement of the cycle's world with recorded calls; the first call replays them in the sandbox.

    Raises:
        StageError: There is no world and none can be made.
        SandboxError: Docker cannot be used, or the world does not run.
    """
    world = await make_world(context)
    figures = find_figures(context)
    if figures is not None and figures.digest == world.digest:
        return figures
    with context.stage(
        REPLAY, f"Replay recorded calls in the world of {context.target.name}", total=FOLDS + 1
    ) as stage:
        train = {item.transcript.trajectory_id: item for item in task_transcripts(context, TRAIN)}
        used = [train[key] for key in world.conversations if key in train]
        held_out = task_transcripts(context, HELD_OUT)
        target_tools = target_tools_of(used, held_out)
        calls = {
            split: agreements_of(
                await replay_in_sandbox(
                    context, world.source_code, held_out, target_tools, in_context=split == CONTEXT_CALLS
                )
            )
            for split in (HELD_OUT_CALLS, CONTEXT_CALLS)
        }
        stage.advance()
        data = read_data(world.source_code)
        function_tools = data.get("functions", [])
        left_out: list[CallAgreement] = []
        for number, fold in enumerate(folds_of(used)):
            rest = [item for item in used if item not in fold]
            if fold and rest:
                rest_data = without_tools(await asyncio.to_thread(data_of, rest, data["unstable"]), data["omitted"])
                if world.functions is not None:
                    rest_data = with_functions(rest_data, function_tools, world.functions.roles)
                source_code = world_source(rest_data, world.module)
                agreements = agreements_of(await replay_in_sandbox(context, source_code, fold, target_tools))
                # The model has seen the calls of the first folds.
                left_out += [call for call in agreements if number >= SHOWN_FOLDS or call.tool not in function_tools]
            stage.advance()
        calls[LEFT_OUT_CALLS] = left_out
        agreement = {split: tool_agreements(results) for split, results in calls.items()}
        # Their wrong answers stay in the figures, which prove the world as it was made.
        refuted = {
            item.tool: item
            for split in (CONTEXT_CALLS, HELD_OUT_CALLS)
            for item in refuted_tools(agreement[split], split)
        }
        omitted = [*world.omitted, *refuted.values()]
        figures = WorldFigures(world.digest, len(used), agreement, omitted, world.functions)
        stage.detail = {
            "digest": world.digest,
            "conversations": len(used),
            "agreement": agreement_json(agreement),
            "omitted": [asdict(item) for item in figures.omitted],
            **({"functions": asdict(world.functions)} if world.functions else {}),
        }
        stage.figure = figures.text
    return figures


def find_figures(context: Context) -> WorldFigures | None:
    """Return the agreement that the cycle has measured last, None if it has measured none."""
    with context.read_session() as session:
        return stored_figures(session, context.cycle_id)


def _details(context: Context, stage: str) -> list[dict[str, Any]]:
    with context.read_session() as session:
        events = list_stage_events(session, context.cycle_id)
    return [event.detail for event in events if event.stage == stage and event.state is StageState.FINISHED]


def _fitting_data(context: Context, items: Sequence[TaskTranscript]) -> tuple[dict[str, Any], list[TaskTranscript]]:
    """Return the data of a world and its conversations: as many as the sandbox and environments can hold."""
    limit = MAX_SOURCE_SHARE * 1024 * context.sandbox_limits.message_kb
    # The largest are left out first: one of them may be larger than all others together.
    used = sorted(items, key=lambda item: (_answer_length(item), item.transcript.trajectory_id))
    while used:
        data = data_of(used)
        source_code = world_source(data)
        if len(source_code.encode()) <= limit and len(WorldData("", data).encoded()) <= MAX_WORLD_BYTES:
            return data, used
        used = used[: 3 * len(used) // 4]
    return {}, []


def _omitted_tools(items: Sequence[TaskTranscript], unstable: Sequence[str]) -> list[OmittedTool]:
    """Return the tools whose answers to tasks that the world is made without disagree with the recorded ones.

    Without a tool's records others may answer otherwise, so the replay is repeated until all that remain agree. The
    replay of one's own code needs no container.
    """
    target_tools = target_tools_of(items, [])
    folds = []
    for fold in folds_of(items):
        rest = [item for item in items if item not in fold]
        if fold and rest:
            folds.append((data_of(rest, unstable), fold))
    omitted: list[OmittedTool] = []
    while True:
        names = [item.tool for item in omitted]
        calls = []
        for data, fold in folds:
            calls += agreements_of(replay_on_host(without_tools(data, names), fold, target_tools))
        disagreeing = [item for item in disagreeing_tools(tool_agreements(calls)) if item.tool not in names]
        if not disagreeing:
            return sorted(omitted, key=lambda item: item.tool)
        omitted += disagreeing


def _answer_length(item: TaskTranscript) -> int:
    return sum(len(call.result.text) for call in item.transcript.calls if call.result is not None)
