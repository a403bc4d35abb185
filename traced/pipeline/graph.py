"""One pass of the state machine: collect, analyze, each capability on its own, approval, promotion, evaluation, report.

Invariants: the state holds ids and names only, everything else is in the store; a stage is idempotent, so a node that
was killed half-way is simply run again; a capability that fails is recorded with its reason and the others go on;
admission and gate fill the machine and have it to themselves; trainings run side by side where the caller says how many
fit, or beside everything where each sees to its own device. The approval node asks the store who still
waits, so that the store, and not the resume value, decides; before that it plays the episodes that people asked for.

How it fails: a ``CapabilityError`` of a capability's stage drops that capability only. Anything else (engine, Docker,
disk, Ctrl-C) leaves the graph at its last checkpoint and is raised to the caller; ``advance`` carries on from there.
A checkpoint that cannot be read, or that another version of the graph wrote, is ``CycleChanged``: nothing is run.

Not covered: what the stages do (``traced/stages``), and more than one process working on the same cycle at once.

Where the graph of a cycle keeps its steps: in the store's own database on PostgreSQL, else in a file beside it.

Invariants: what is read back revives plain values and nothing else (strict msgpack), so that who can write to the
database runs no code here; a write that has begun is finished even when the task that asked for it is cancelled.
How it fails: ``StoreUnavailable`` for a database that cannot be reached, opened or written, while the block runs too.
Not covered: more than one process working on the same cycle; deleting old steps (``traced.maintenance.prune``).
"""

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict, cast

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send, interrupt
from langsmith import tracing_context
from sqlalchemy.engine import make_url

from store.errors import StoreUnavailable
from store.schema_version import patience
from traced.core.errors import CapabilityError, CycleChanged

CHECKPOINTS = "checkpoints.db"

Saver = BaseCheckpointSaver[Any]


class WholeWrites(Saver):
    """A checkpointer, mixed in before a library's own, that finishes the writes that it has begun.

    A write to SQLite that is cut off between its rows and its commit would keep the database locked for this process'
    next connection.
    """

    begun: set[asyncio.Future[Any]]

    async def aput(self, *given: Any, **named: Any) -> RunnableConfig:
        """Save a checkpoint."""
        return cast(RunnableConfig, await self._finish(super().aput(*given, **named)))

    async def aput_writes(self, *given: Any, **named: Any) -> None:
        """Save what one task of a step has written."""
        await self._finish(super().aput_writes(*given, **named))

    async def _finish(self, write: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(write)
        self.begun.add(task)
        task.add_done_callback(self.begun.discard)
        return await asyncio.shield(task)


class WholeSqlite(WholeWrites, AsyncSqliteSaver):
    """The steps in a SQLite file."""


@asynccontextmanager
async def checkpoints(data_dir: Path, store_url: str = "") -> AsyncIterator[Saver]:
    """The checkpointer that goes with the store at ``store_url`` ("": SQLite in the data directory)."""
    postgres = bool(store_url) and make_url(store_url).get_backend_name() != "sqlite"
    opened = _in_postgres(store_url) if postgres else _in_file(data_dir / CHECKPOINTS)
    async with opened as saver:
        saver.begun = set()
        try:
            yield saver
        finally:
            while saver.begun:
                await asyncio.wait(saver.begun)


@asynccontextmanager
async def _in_file(path: Path) -> AsyncIterator[WholeWrites]:
    try:
        async with aiosqlite.connect(path) as connection:
            yield WholeSqlite(connection, serde=_strict())
    except aiosqlite.Error as error:
        raise StoreUnavailable(f"{path} failed: {error}; check that it is writable and has space") from error


@asynccontextmanager
async def _in_postgres(url: str) -> AsyncIterator[WholeWrites]:
    try:
        import psycopg
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
    except ImportError as error:
        raise StoreUnavailable(f"no checkpointer for PostgreSQL ({error}); `pip install traced[postgres]`") from error

    class WholePostgres(WholeWrites, AsyncPostgresSaver):
        """The steps in tables beside the store's."""

    address = make_url(url).set(drivername="postgresql")
    whole = address.render_as_string(hide_password=False)
    try:
        connection = await psycopg.AsyncConnection.connect(
            whole, autocommit=True, prepare_threshold=0, row_factory=dict_row, **patience(whole)
        )
        async with connection:
            saver = WholePostgres(connection, serde=_strict())
            await saver.setup()
            yield saver
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database {address!r} failed: {error}; check that it is there") from error


def _strict() -> JsonPlusSerializer:
    return JsonPlusSerializer(allowed_msgpack_modules=None)


GRAPH_VERSION = 1  # of nodes, edges and state: raise it where an unfinished cycle could not go on with the new ones
PROMPT = "optimize-prompt"  # the node between admission and training, where prompts are tried first
GRAPH = "graph"  # in a checkpoint's metadata: the version that wrote it


class CycleState(TypedDict, total=False):
    """Ids of one cycle; ``adapters`` are the versions whose gate passed, in the order of ``capabilities``."""

    cycle_id: str
    capabilities: list[str]
    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]
    promoted: list[str]


class CapabilityState(TypedDict, total=False):
    """Ids of one capability's way through the cycle; ``attempt`` counts the environments written so far."""

    cycle_id: str
    capability: str
    attempt: int
    environment: str
    admitted: bool
    adapter: str
    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]


class CapabilityResult(TypedDict, total=False):
    """What a capability's way hands back to the cycle."""

    adapters: Annotated[list[str], operator.add]
    dropped: Annotated[list[str], operator.add]


@dataclass(frozen=True)
class Stages:
    """The stations as the graph calls them: ids in, ids out, each callable any number of times with the same result."""

    collect: Callable[[str], Awaitable[None]]
    analyze: Callable[[str], Awaitable[list[str]]]  # -> names of the retained capabilities
    synthesize: Callable[[str, str, int], Awaitable[str]]  # cycle, capability, attempt -> environment hash
    admit: Callable[[str, str, str], Awaitable[bool]]  # cycle, capability, environment hash
    train: Callable[[str, str, str], Awaitable[str]]  # cycle, capability, environment hash -> adapter version
    gate: Callable[[str, str], Awaitable[bool]]  # cycle, adapter version
    waiting: Callable[[str, list[str]], Awaitable[list[str]]]  # adapter versions nobody has decided about
    promote: Callable[[str, list[str]], Awaitable[list[str]]]  # publishes the approved ones
    evaluate: Callable[[str, list[str]], Awaitable[None]]
    report: Callable[[str], Awaitable[None]]
    drop: Callable[[str, str, str, str], Awaitable[None]]  # cycle, capability, stage, reason
    asked: Callable[[str, list[str]], Awaitable[dict[str, int]]]  # adapter versions -> looks that a person wants
    look: Callable[[str, str, int], Awaitable[bool]]  # cycle, adapter version, number: its gate once more
    optimize_prompt: Callable[
        [str, str, str], Awaitable[str]
    ]  # as train; -> why no adapter is trained, "" where one is


@dataclass(frozen=True)
class Standing:
    """Where a cycle stands: ``waiting`` adapters if it is interrupted at approval, ``finished`` when it is over."""

    state: CycleState
    started: bool
    finished: bool
    waiting: list[str]


@dataclass
class Room:
    """What fits on the machine at once: so many ``trainings``, or one stage that fills it; first come, first served.

    ``trainings`` 0: any number, and beside everything else, because each waits for a device of its own.
    """

    trainings: int
    _free: asyncio.Semaphore = field(init=False)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(max(1, self.trainings))

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """The machine for one stage alone."""
        async with self._taken(max(1, self.trainings)):
            yield

    @asynccontextmanager
    async def share(self) -> AsyncIterator[None]:
        """A training's place."""
        async with self._taken(min(1, self.trainings)):
            yield

    @asynccontextmanager
    async def _taken(self, places: int) -> AsyncIterator[None]:
        taken = 0
        try:
            if places:
                async with self._turn:
                    while taken < places:
                        await self._free.acquire()
                        taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


class Node(Protocol):
    """A node of a capability's way, as LangGraph calls it."""

    def __call__(self, state: CapabilityState) -> Awaitable[dict[str, Any]]:
        """Do the work of one stage; returns the state it changes."""
        ...


def _dropping(stages: Stages, stage: str, work: Node) -> Node:
    """The boundary where a capability's failure is attributed: recorded once, and the cycle goes on without it."""

    async def node(state: CapabilityState) -> dict[str, Any]:
        try:
            return await work(state)
        except CapabilityError as error:
            await stages.drop(state["cycle_id"], state["capability"], stage, str(error))
            return {"dropped": [state["capability"]]}

    return node


def _capability_nodes(stages: Stages, attempts: int, room: Room) -> dict[str, Node]:
    async def synthesize(state: CapabilityState) -> dict[str, Any]:
        attempt = state.get("attempt", 0)
        environment = await stages.synthesize(state["cycle_id"], state["capability"], attempt)
        return {"environment": environment, "attempt": attempt + 1}

    async def admit(state: CapabilityState) -> dict[str, Any]:
        async with room.whole():
            admitted = await stages.admit(state["cycle_id"], state["capability"], state["environment"])
        if not admitted and state["attempt"] >= attempts:
            raise CapabilityError(f"none of {attempts} candidate environments was admitted")
        return {"admitted": admitted}

    async def optimize_prompt(state: CapabilityState) -> dict[str, Any]:
        async with room.whole():
            why_not = await stages.optimize_prompt(state["cycle_id"], state["capability"], state["environment"])
        if why_not:
            raise CapabilityError(why_not)
        return {}

    async def train(state: CapabilityState) -> dict[str, Any]:
        async with room.share():
            adapter = await stages.train(state["cycle_id"], state["capability"], state["environment"])
        return {"adapter": adapter}

    async def gate(state: CapabilityState) -> dict[str, Any]:
        async with room.whole():
            passed = await stages.gate(state["cycle_id"], state["adapter"])
        return {"adapters": [state["adapter"]]} if passed else {"dropped": [state["capability"]]}

    nodes = {"synthesize": synthesize, "admit": admit, PROMPT: optimize_prompt, "train": train, "gate": gate}
    return {name: _dropping(stages, name, node) for name, node in nodes.items()}


async def _look_again(stages: Stages, cycle_id: str, adapters: list[str]) -> None:
    """Play what people asked for while they decide; a version that loses its pass waits no more."""
    for adapter, look in (await stages.asked(cycle_id, adapters)).items():
        try:
            await stages.look(cycle_id, adapter, look)
        except CapabilityError as error:
            await stages.drop(cycle_id, adapter.partition("@")[0], "gate", str(error))


def _unless_dropped(following: str) -> Callable[[CapabilityState], str]:
    return lambda state: END if state.get("dropped") else following


def _after_admission(admitted: str) -> Callable[[CapabilityState], str]:
    def following(state: CapabilityState) -> str:
        if state.get("dropped"):
            return END
        return admitted if state["admitted"] else "synthesize"

    return following


def _capability_graph(
    stages: Stages, attempts: int, room: Room, prompt_first: bool
) -> CompiledStateGraph[Any, Any, Any, Any]:
    admitted = PROMPT if prompt_first else "train"
    graph = StateGraph(CapabilityState, output_schema=CapabilityResult)
    for name, node in _capability_nodes(stages, attempts, room).items():
        graph.add_node(name, node)
    graph.add_edge(START, "synthesize")
    graph.add_conditional_edges("synthesize", _unless_dropped("admit"), ["admit", END])
    graph.add_conditional_edges("admit", _after_admission(admitted), [admitted, "synthesize", END])
    graph.add_conditional_edges(PROMPT, _unless_dropped("train"), ["train", END])
    graph.add_conditional_edges("train", _unless_dropped("gate"), ["gate", END])
    graph.add_edge("gate", END)
    return graph.compile()


def _fan_out(state: CycleState) -> list[Send] | str:
    """One way per retained capability; none retained: straight to the report, which says so."""
    sends = [Send("capability", {"cycle_id": state["cycle_id"], "capability": name}) for name in state["capabilities"]]
    return sends or "report"


def build_graph(
    stages: Stages, checkpointer: Saver, *, attempts: int = 5, trainings: int = 1, prompt_first: bool = False
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The cycle's graph; ``attempts`` bounds the candidate environments per capability, ``trainings`` is a Room's.

    ``prompt_first``: no adapter is trained for a capability that a prompt fixes.
    """

    async def collect(state: CycleState) -> dict[str, Any]:
        await stages.collect(state["cycle_id"])
        return {}

    async def analyze(state: CycleState) -> dict[str, Any]:
        return {"capabilities": await stages.analyze(state["cycle_id"])}

    async def approval(state: CycleState) -> dict[str, Any]:
        await _look_again(stages, state["cycle_id"], state.get("adapters", []))
        while waiting := await stages.waiting(state["cycle_id"], state.get("adapters", [])):
            interrupt({"adapters": waiting})
        return {}

    async def promote(state: CycleState) -> dict[str, Any]:
        return {"promoted": await stages.promote(state["cycle_id"], state.get("adapters", []))}

    async def evaluate(state: CycleState) -> dict[str, Any]:
        await stages.evaluate(state["cycle_id"], state["promoted"])
        return {}

    async def report(state: CycleState) -> dict[str, Any]:
        await stages.report(state["cycle_id"])
        return {}

    graph = StateGraph(CycleState)
    for node in (collect, analyze, approval, promote, evaluate, report):
        graph.add_node(node.__name__, node)
    graph.add_node("capability", _capability_graph(stages, attempts, Room(trainings), prompt_first))
    graph.add_edge(START, "collect")
    graph.add_edge("collect", "analyze")
    graph.add_conditional_edges("analyze", _fan_out, ["capability", "report"])
    for before, after in [("capability", "approval"), ("approval", "promote"), ("promote", "evaluate")]:
        graph.add_edge(before, after)
    graph.add_edge("evaluate", "report")
    graph.add_edge("report", END)
    return graph.compile(checkpointer=checkpointer)


def _thread(cycle_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": cycle_id}, "metadata": {GRAPH: GRAPH_VERSION}}


async def standing(graph: CompiledStateGraph[Any, Any, Any, Any], cycle_id: str) -> Standing:
    """Read the last checkpoint of a cycle. Raises ``CycleChanged``."""
    try:
        snapshot = await graph.aget_state(_thread(cycle_id))
        started = snapshot.created_at is not None
        waiting = [name for pause in snapshot.interrupts for name in pause.value["adapters"]]
    except (ValueError, TypeError, LookupError, AttributeError, EOFError) as error:  # what decoders say; no database's
        raise CycleChanged(
            f"the last step of {cycle_id} cannot be read ({type(error).__name__}: {error}), so it ends here",
            hint="traced cycle start; what it has recorded stays",
        ) from error
    written = (snapshot.metadata or {}).get(GRAPH, 1)
    if started and snapshot.next and written != GRAPH_VERSION:
        raise CycleChanged(
            f"{cycle_id} was begun with version {written} of the cycle's graph and this is {GRAPH_VERSION}, "
            "so it ends here",
            hint="traced cycle start; what it has recorded stays",
        )
    return Standing(cast(CycleState, snapshot.values), started, started and not snapshot.next, waiting)


async def advance(graph: CompiledStateGraph[Any, Any, Any, Any], cycle_id: str) -> Standing:
    """Begin the cycle, or carry it on from its last checkpoint, until it ends or waits for approval.

    Raises ``CycleChanged`` for a cycle that cannot go on; none of its nodes is run then.
    """
    before = await standing(graph, cycle_id)
    if before.finished:
        return before
    given: Any = None  # a killed cycle: its pending nodes are run again
    if not before.started:
        given = {"cycle_id": cycle_id}
    elif before.waiting:
        given = Command(resume=True)
    with tracing_context(enabled=False):  # LangGraph would tell LangSmith, where the environment says so
        await graph.ainvoke(given, _thread(cycle_id), durability="sync")
    return await standing(graph, cycle_id)
