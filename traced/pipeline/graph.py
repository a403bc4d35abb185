"""The cycle as a LangGraph state machine, and where its checkpoints are kept.

Invariants: the state holds ids and names only, everything else is in the store. Stages are idempotent, so a node
killed half-way is run again. Checkpoints revive plain values only (strict msgpack), so write access to the database
does not run code here; a write that has begun is finished even if its task is cancelled.

How it fails: a ``CapabilityError`` drops that capability only; any other error leaves the graph at its last
checkpoint, from which ``advance`` continues. An unreadable checkpoint or one of another graph version raises
``CycleChanged``, a database failure ``StoreUnavailable``. Not covered: several processes working on the same cycle.
"""

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, cast

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send, StateSnapshot, interrupt
from langsmith import tracing_context
from sqlalchemy.engine import make_url

from store.errors import StoreUnavailable
from store.schema_version import COMMIT_SYNCHRONOUSLY, connect_options
from traced.core.errors import CapabilityError, CycleChanged
from traced.pipeline.stages import PROMPT, Stages

CHECKPOINTS = "checkpoints.db"
# Version of nodes, edges and state. Raise it whenever an unfinished cycle could not continue on the new graph.
GRAPH_VERSION = 1
GRAPH = "graph"  # key in a checkpoint's metadata: the version that wrote it

Saver = BaseCheckpointSaver[Any]
CycleGraph = CompiledStateGraph[Any, Any, Any, Any]
T = TypeVar("T")


class ShieldedWrites(Saver):
    """Checkpointer mixin that completes every write it has begun.

    A write to SQLite that is cut off between its rows and its commit would keep the database locked for the next
    connection of this process.
    """

    pending_writes: set[asyncio.Future[Any]]

    async def aput(self, *args: Any, **kwargs: Any) -> RunnableConfig:
        """Save a checkpoint."""
        return cast(RunnableConfig, await self._finish(super().aput(*args, **kwargs)))

    async def aput_writes(self, *args: Any, **kwargs: Any) -> None:
        """Save the writes of one task of a step."""
        await self._finish(super().aput_writes(*args, **kwargs))

    async def _finish(self, write: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(write)
        # The event loop keeps only weak references to tasks.
        self.pending_writes.add(task)
        task.add_done_callback(self.pending_writes.discard)
        return await asyncio.shield(task)


class ShieldedSqliteSaver(ShieldedWrites, AsyncSqliteSaver):
    """Checkpoints in a SQLite file."""


@asynccontextmanager
async def checkpoints(data_dir: Path, store_url: str = "") -> AsyncIterator[Saver]:
    """Open the checkpointer of the store at ``store_url`` ("": SQLite in the data directory)."""
    postgres = bool(store_url) and make_url(store_url).get_backend_name() != "sqlite"
    saver_context = _in_postgres(store_url) if postgres else _in_file(data_dir / CHECKPOINTS)
    async with saver_context as saver:
        saver.pending_writes = set()
        try:
            yield saver
        finally:
            # Writes outlive the tasks that began them, so the connection stays open until the last one has ended.
            while saver.pending_writes:
                await asyncio.wait(saver.pending_writes)


@asynccontextmanager
async def _in_file(path: Path) -> AsyncIterator[ShieldedWrites]:
    try:
        async with aiosqlite.connect(path) as connection:
            # As in the store: a checkpoint must not be lost when rows that were written later are kept.
            await connection.execute("PRAGMA synchronous=FULL")
            yield ShieldedSqliteSaver(connection, serde=_strict())
    except aiosqlite.Error as error:
        raise StoreUnavailable(f"{path} failed: {error}; check permissions and free space") from error


@asynccontextmanager
async def _in_postgres(url: str) -> AsyncIterator[ShieldedWrites]:
    try:
        import psycopg
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
    except ImportError as error:
        raise StoreUnavailable(f"no checkpointer for PostgreSQL ({error}); `pip install traced[postgres]`") from error

    class WholePostgres(ShieldedWrites, AsyncPostgresSaver):
        """Checkpoints in tables next to the store's."""

    address = make_url(url).set(drivername="postgresql")
    full_url = address.render_as_string(hide_password=False)
    try:
        connection = await psycopg.AsyncConnection.connect(
            full_url, autocommit=True, prepare_threshold=0, row_factory=dict_row, **connect_options(full_url)
        )
        async with connection:
            await connection.execute(COMMIT_SYNCHRONOUSLY)
            saver = WholePostgres(connection, serde=_strict())
            await saver.setup()
            yield saver
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database {address!r} failed: {error}; check that it is running") from error


def _strict() -> JsonPlusSerializer:
    return JsonPlusSerializer(allowed_msgpack_modules=None)


class CycleState(TypedDict, total=False):
    """Ids of one cycle.

    ``capabilities`` are the retained ones, after the attribution those to train; ``adapters`` are the versions whose
    gate passed, in their order.
    """

    cycle_id: str
    capabilities: list[str]
    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]
    promoted: list[str]


class CapabilityState(TypedDict, total=False):
    """Ids of one capability in the cycle; ``attempt`` counts the environments written."""

    cycle_id: str
    capability: str
    attempt: int
    environment: str
    admitted: bool
    adapter: str
    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]


class CapabilityResult(TypedDict, total=False):
    """What a capability's subgraph returns to the cycle."""

    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]


@dataclass(frozen=True)
class CycleStatus:
    """The status of a cycle; ``waiting`` names the adapters that wait for approval."""

    state: CycleState
    started: bool
    finished: bool
    waiting: list[str]


@dataclass
class CapacityLimiter:
    """Limits what runs on the machine at once: ``trainings`` trainings, or one stage that needs all of it.

    Requests are served in order. With ``trainings`` 0, trainings are unlimited and do not exclude other stages, because
    each of them waits for its own device.
    """

    trainings: int
    _free: asyncio.Semaphore = field(init=False)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(max(1, self.trainings))

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the whole machine."""
        async with self._acquire(max(1, self.trainings)):
            yield

    @asynccontextmanager
    async def share(self) -> AsyncIterator[None]:
        """Hold one training's place."""
        async with self._acquire(min(1, self.trainings)):
            yield

    @asynccontextmanager
    async def _acquire(self, places: int) -> AsyncIterator[None]:
        acquired = 0
        try:
            if places:
                # One request collects its places at a time; two that each hold a part of the machine would deadlock.
                async with self._turn:
                    while acquired < places:
                        await self._free.acquire()
                        acquired += 1
            yield
        finally:
            for _ in range(acquired):
                self._free.release()


class Node(Protocol):
    """A node of the capability subgraph, as LangGraph calls it."""

    def __call__(self, state: CapabilityState) -> Awaitable[CapabilityState]:
        """Do the work of one stage; returns the changed state."""
        ...


def _dropping(stages: Stages, stage: str, work: Node) -> Node:
    """Wrap a node so that a capability's failure is recorded and the cycle continues without it."""

    async def node(state: CapabilityState) -> CapabilityState:
        try:
            return await work(state)
        except CapabilityError as error:
            await stages.drop(state["cycle_id"], state["capability"], stage, str(error))
            return {"dropped": [state["capability"]]}

    return node


def _capability_nodes(stages: Stages, attempts: int, capacity: CapacityLimiter) -> dict[str, Node]:
    async def synthesize(state: CapabilityState) -> CapabilityState:
        attempt = state.get("attempt", 0)
        environment = await stages.synthesize(state["cycle_id"], state["capability"], attempt)
        return {"environment": environment, "attempt": attempt + 1}

    async def admit(state: CapabilityState) -> CapabilityState:
        async with capacity.exclusive():
            is_admitted = await stages.admit(state["cycle_id"], state["capability"], state["environment"])
        # The last attempt is an error rather than a result, so the capability is dropped with a reason.
        if not is_admitted and state["attempt"] >= attempts:
            raise CapabilityError(f"none of {attempts} candidate environments was admitted")
        return {"admitted": is_admitted}

    async def optimize_prompt(state: CapabilityState) -> CapabilityState:
        async with capacity.exclusive():
            reason = await stages.optimize_prompt(state["cycle_id"], state["capability"], state["environment"])
        if reason:
            raise CapabilityError(reason)
        return {}

    async def train(state: CapabilityState) -> CapabilityState:
        async with capacity.share():
            adapter = await stages.train(state["cycle_id"], state["capability"], state["environment"])
        return {"adapter": adapter}

    async def gate(state: CapabilityState) -> CapabilityState:
        async with capacity.exclusive():
            passed = await stages.gate(state["cycle_id"], state["adapter"])
        return {"adapters": [state["adapter"]]} if passed else {"dropped": [state["capability"]]}

    nodes = {"synthesize": synthesize, "admit": admit, PROMPT: optimize_prompt, "train": train, "gate": gate}
    return {name: _dropping(stages, name, node) for name, node in nodes.items()}


async def _run_requested_rounds(stages: Stages, cycle_id: str, adapters: list[str]) -> None:
    """Run the gate rounds that people requested; an adapter that no longer passes is dropped."""
    for adapter, rounds in (await stages.requested_rounds(cycle_id, adapters)).items():
        try:
            await stages.repeat_gate(cycle_id, adapter, rounds)
        except CapabilityError as error:
            await stages.drop(cycle_id, adapter.partition("@")[0], "gate", str(error))


def _unless_dropped(next_node: str) -> Callable[[CapabilityState], str]:
    return lambda state: END if state.get("dropped") else next_node


def _after_admission(next_stage: str) -> Callable[[CapabilityState], str]:
    def next_node(state: CapabilityState) -> str:
        if state.get("dropped"):
            return END
        return next_stage if state["admitted"] else "synthesize"

    return next_node


def _capability_graph(stages: Stages, attempts: int, capacity: CapacityLimiter, prompt_first: bool) -> CycleGraph:
    next_stage = PROMPT if prompt_first else "train"
    graph = StateGraph(CapabilityState, output_schema=CapabilityResult)
    for name, node in _capability_nodes(stages, attempts, capacity).items():
        graph.add_node(name, node)
    graph.add_edge(START, "synthesize")
    graph.add_conditional_edges("synthesize", _unless_dropped("admit"), ["admit", END])
    graph.add_conditional_edges("admit", _after_admission(next_stage), [next_stage, "synthesize", END])
    graph.add_conditional_edges(PROMPT, _unless_dropped("train"), ["train", END])
    graph.add_conditional_edges("train", _unless_dropped("gate"), ["gate", END])
    graph.add_edge("gate", END)
    return graph.compile()


def _fan_out(state: CycleState) -> list[Send] | str:
    """Start one subgraph per capability to train; without any, go straight to the report, which says so."""
    sends = [Send("capability", {"cycle_id": state["cycle_id"], "capability": name}) for name in state["capabilities"]]
    return sends or "report"


def build_graph(
    stages: Stages, checkpointer: Saver, *, attempts: int = 5, trainings: int = 1, prompt_first: bool = False
) -> CycleGraph:
    """Build the cycle's graph.

    Args:
        attempts: Maximum number of candidate environments per capability.
        trainings: Trainings at once, as in ``CapacityLimiter``.
        prompt_first: Try a prompt first and train no adapter for a capability that it fixes.
    """

    async def collect(state: CycleState) -> CycleState:
        await stages.collect(state["cycle_id"])
        return {}

    async def analyze(state: CycleState) -> CycleState:
        return {"capabilities": await stages.analyze(state["cycle_id"])}

    async def attribute(state: CycleState) -> CycleState:
        return {"capabilities": await stages.attribute(state["cycle_id"], state["capabilities"])}

    async def compose(state: CycleState) -> CycleState:
        cycle_id, adapters, joint_versions = state["cycle_id"], state.get("adapters", []), []
        for training, environment in await stages.mixture(cycle_id, adapters):
            try:
                joint_versions.append(await stages.train(cycle_id, training, environment))
            except CapabilityError as error:
                await stages.drop(cycle_id, training, "train", error.message)
        return {"adapters": await stages.compose(cycle_id, adapters, joint_versions)}

    async def approval(state: CycleState) -> CycleState:
        await _run_requested_rounds(stages, state["cycle_id"], state.get("adapters", []))
        # The store decides who still waits, not the resume value: decisions may come from any process.
        while waiting := await stages.waiting(state["cycle_id"], state.get("adapters", [])):
            interrupt({"adapters": waiting})
        return {}

    async def promote(state: CycleState) -> CycleState:
        return {"promoted": await stages.promote(state["cycle_id"], state.get("adapters", []))}

    async def evaluate(state: CycleState) -> CycleState:
        await stages.evaluate(state["cycle_id"], state["promoted"])
        return {}

    async def report(state: CycleState) -> CycleState:
        await stages.report(state["cycle_id"])
        return {}

    graph = StateGraph(CycleState)
    for node in (collect, analyze, attribute, compose, approval, promote, evaluate, report):
        graph.add_node(node.__name__, node)
    graph.add_node("capability", _capability_graph(stages, attempts, CapacityLimiter(trainings), prompt_first))
    graph.add_edge(START, "collect")
    graph.add_edge("collect", "analyze")
    graph.add_edge("analyze", "attribute")
    graph.add_conditional_edges("attribute", _fan_out, ["capability", "report"])
    order = ("capability", "compose", "approval", "promote", "evaluate")
    for start_node, end_node in pairwise(order):
        graph.add_edge(start_node, end_node)
    graph.add_edge("evaluate", "report")
    graph.add_edge("report", END)
    return graph.compile(checkpointer=checkpointer)


def _thread(cycle_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": cycle_id}, "metadata": {GRAPH: GRAPH_VERSION}}


async def cycle_status(graph: CycleGraph, cycle_id: str) -> CycleStatus:
    """Read the status of a cycle from its last checkpoint; raises ``CycleChanged``."""
    try:
        snapshot = await graph.aget_state(_thread(cycle_id))
        started = snapshot.created_at is not None
        waiting = [name for pause in snapshot.interrupts for name in pause.value["adapters"]]
    # These are errors of decoders; database errors must pass through as ``StoreUnavailable``.
    except (ValueError, TypeError, LookupError, AttributeError, EOFError) as error:
        raise CycleChanged(
            f"the last checkpoint of {cycle_id} cannot be read ({type(error).__name__}: {error}), so the cycle ends",
            hint="traced cycle start; recorded results are kept",
        ) from error
    version = (snapshot.metadata or {}).get(GRAPH, 1)
    # Not ``next``, which leaves out nodes that have finished while the checkpoint after them was not written any more.
    is_unfinished = bool(snapshot.tasks)
    if started and is_unfinished and version != GRAPH_VERSION:
        raise CycleChanged(
            f"{cycle_id} was started with graph version {version}, this release has version {GRAPH_VERSION}, "
            "so the cycle ends",
            hint="traced cycle start; recorded results are kept",
        )
    return CycleStatus(cast(CycleState, snapshot.values), started, started and not is_unfinished, waiting)


async def checkpoint_of(graph: CycleGraph, cycle_id: str) -> StateSnapshot:
    """Return the last checkpoint of a cycle, with those of its capabilities as the states of its tasks."""
    return await graph.aget_state(_thread(cycle_id), subgraphs=True)


async def forget_checkpoints(graph: CycleGraph, cycle_id: str) -> None:
    """Delete the checkpoints of a cycle, so that ``advance`` begins its graph anew."""
    assert isinstance(graph.checkpointer, BaseCheckpointSaver)
    await graph.checkpointer.adelete_thread(cycle_id)


async def advance(graph: CycleGraph, cycle_id: str) -> CycleStatus:
    """Begin or continue the cycle until it ends or waits for approval.

    Raises:
        CycleChanged: The cycle cannot continue; none of its nodes has run.
    """
    status = await cycle_status(graph, cycle_id)
    if status.finished:
        return status
    # None makes LangGraph run the pending nodes of an interrupted cycle again.
    graph_input: Command[Any] | dict[str, str] | None = None
    if not status.started:
        graph_input = {"cycle_id": cycle_id}
    elif status.waiting:
        graph_input = Command(resume=True)
    # Without this, LangGraph reports to LangSmith whenever the environment variables ask for it.
    with tracing_context(enabled=False):
        await graph.ainvoke(graph_input, _thread(cycle_id), durability="sync")
    return await cycle_status(graph, cycle_id)
