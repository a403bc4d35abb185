"""The command ``traced requalify``: prepare another base model to take over from the live system.

Invariants: what is live goes on answering until a person sets ``model.spec`` to the new base model. The same command
resumes a stopped cycle. The new versions are approved together: without a question only if the handover passed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated

import typer
from rich.prompt import Confirm
from sqlmodel import Session

from sandbox.client import reap_orphans
from sandbox.image import ensure_image
from store.records import Cycle, CycleState
from store.repositories.promotions import read_adapter_state, serving_adapters
from store.types import GateAnswer
from traced.cli.options import AsJson, DataDir, Overrides, Seed, Threads, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import writing
from traced.config.settings import Settings
from traced.core.errors import TracedError
from traced.core.ownership import CYCLE_LOCK, hold_directory, sandbox_owner
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.evaluation.figures import CycleFigures
from traced.evaluation.figures import as_json as figures_as_json
from traced.evaluation.report import summary_table
from traced.inference.model_files import base_model, resolve_model
from traced.pipeline.context import Context, open_context, utc_now
from traced.pipeline.cycles import find_cycle
from traced.pipeline.handover import Handover, find_handover
from traced.pipeline.predecessor import Predecessor, check_engines, current_predecessor, find_predecessor
from traced.pipeline.preflight import check_cycle
from traced.pipeline.promote import approve_together
from traced.pipeline.report import gather
from traced.registry.decision_rules import held_text
from traced.routing.composition import MERGED, capability_of

ACTOR = "traced requalify"


@dataclass(frozen=True)
class Result:
    """The state of the cycle after this run.

    Attributes:
        waiting: The versions that await a decision.
        live: Those that are live on the new base model.
        objection: Why a person has to be shown what waits; "" if the handover speaks for it.
        of_other_targets: The live versions of the old base model that other targets have.
    """

    cycle_id: str
    figures: CycleFigures
    handover: Handover | None
    waiting: list[str]
    is_finished: bool
    live: list[str]
    objection: str
    of_other_targets: list[str]


def requalify(
    *,
    model: Annotated[str, typer.Option("--model", help='New base model: "bundled-large", "smollm2" or a directory.')],
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Approve the new versions if the handover passed, without a question.")
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a new base model: calibrate the live adapters' environments, train again, compare with what is live."""
    options = {"seed": seed, "engine__threads": threads}
    predecessor = read_settings(data_dir, overrides, **options).model.spec
    settings = read_settings(data_dir, overrides, model__spec=model, model__predecessor=predecessor, **options)
    # The handover compares adapters, so one is trained also where a prompt would be enough.
    training = settings.training.model_copy(update={"prompt_first": False})
    settings = settings.model_copy(update={"training": training})
    _check(settings)
    with hold_directory(settings.data_dir, now=utc_now, version=version("traced"), file_name=CYCLE_LOCK):
        result = _run(settings, yes=yes)
    if as_json:
        handover = asdict(result.handover) | {"answer": result.handover.answer} if result.handover else None
        waiting = {"waiting": result.waiting} if result.waiting else {}
        print_json({**figures_as_json(result.figures), "handover": handover, **waiting})
        return
    console.print(summary_table(result.figures))
    if result.handover is not None:
        console.print(f"Handover: {result.handover.text}", highlight=False)
    console.print(_next_step(settings, result), highlight=False)


def _check(settings: Settings) -> None:
    """Raise an error for settings with which no requalification can begin."""
    check_engines(settings)
    new, old = base_model(settings), resolve_model(settings.model.predecessor, settings.data_dir)
    if new.name == old.name:
        raise TracedError(
            f"{new.name} is the base model already",
            hint="--model: another base model; its directory must have another name",
        )
    check_cycle(settings)


def _run(settings: Settings, *, yes: bool) -> Result:
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with writing(settings) as session:
        cycle = find_cycle(
            session,
            settings,
            base_model(settings).name,
            at=utc_now(),
            accepts=lambda cycle: _is_prepared(session, settings, cycle),
        )
        if find_predecessor(session, cycle.id) is None:
            current_predecessor(session, settings)  # raises if nothing is live, and then no cycle is stored
    ensure_image(build_missing=True)
    reap_orphans(sandbox_owner(settings.data_dir))
    display = Progress(progress)
    with Meter() as meter, display.display():
        result = asyncio.run(_advance(settings, cycle.id, display, meter, _approver(yes=yes)))
        if result.waiting and progress.is_terminal:
            with display.suspended():
                is_approved = _ask(settings, result)
            if is_approved:
                result = asyncio.run(
                    _advance(settings, cycle.id, display, meter, _approver(yes=True, confirmation=result.waiting))
                )
    return result


def _is_prepared(session: Session, settings: Settings, cycle: Cycle) -> bool:
    """Whether a finished cycle has compared the new base model with what is live on the old one now, and passed."""
    if cycle.state is not CycleState.FINISHED or not _passed(find_handover(session, cycle.id)):
        return False
    predecessor, current = find_predecessor(session, cycle.id), current_predecessor(session, settings)
    return predecessor is not None and (predecessor.model, predecessor.incumbent.composition, predecessor.versions) == (
        current.model,
        current.incumbent.composition,
        current.versions,
    )


async def _advance(
    settings: Settings,
    cycle_id: str,
    display: Progress,
    meter: Meter,
    approve: Callable[[Context, Sequence[str]], bool],
) -> Result:
    # Imported here because it loads langgraph, which takes a second.
    from traced.pipeline.runner import run_cycle

    async with open_context(settings, cycle_id, display, meter) as context:
        status = await run_cycle(context, approve)
        with context.read_session() as session:
            handover, predecessor = find_handover(session, cycle_id), find_predecessor(session, cycle_id)
            live = serving_adapters(session, context.model.name)
            objection = _objection(session, status.waiting)
        of_other_targets = _of_other_targets(predecessor) if predecessor else []
        return Result(
            cycle_id,
            gather(context),
            handover,
            status.waiting,
            status.finished,
            live,
            objection,
            of_other_targets,
        )


def _of_other_targets(predecessor: Predecessor) -> list[str]:
    """Return the live versions that the predecessor has for other targets."""
    versions = {*predecessor.versions.values()}
    return [name for name in predecessor.incumbent.live if name not in versions and capability_of(name) != MERGED]


def _approver(*, yes: bool, confirmation: Sequence[str] = ()) -> Callable[[Context, Sequence[str]], bool]:
    """Return the function that approves what waits.

    Args:
        confirmation: The versions that a person was shown with their handover, and approves whatever its answer.
    """

    def approve(context: Context, adapters: Sequence[str]) -> bool:
        with context.read_session() as session:
            handover = find_handover(session, context.cycle_id)
            # One may have been rejected while the others were shown.
            may_approve = {*adapters} == {*confirmation} or not _objection(session, adapters)
        if handover is None or not yes or not may_approve:
            return False
        approve_together(context, adapters, actor=ACTOR, reason=f"handover: {handover.text}")
        context.progress.note(f"approved for {context.model.name}: {', '.join(adapters)}")
        return True

    return approve


def _objection(session: Session, adapters: Sequence[str]) -> str:
    """Return why a person has to be shown these versions before an approval, "" if the handover speaks for all."""
    states = [read_adapter_state(session, name, lock=False) for name in adapters]
    reasons = [state.handover or (held_text(state.fallen) if state.fallen else "") for state in states]
    return next(filter(None, reasons), "")


def _passed(handover: Handover | None) -> bool:
    return handover is not None and handover.answer is GateAnswer.PASS


def _ask(settings: Settings, result: Result) -> bool:
    assert result.handover is not None
    progress.print(f"\n{result.handover.text}", highlight=False)
    if result.objection:
        progress.print(f"Held: {result.objection}.", highlight=False)
    question = f"Put {', '.join(result.waiting)} live for {settings.model.spec}?"
    try:
        return Confirm.ask(question, console=progress, default=False)
    except EOFError:
        return False


def _next_step(settings: Settings, result: Result) -> str:
    new, old = settings.model.spec, settings.model.predecessor
    if result.waiting:
        names, commands = ", ".join(result.waiting), "the same command with --yes"
        if result.objection:
            commands = f"traced approve or traced reject, because {result.objection}"
        return f"Decision pending: {names}. The system of {old} goes on until then. Next: {commands}."
    promoted_names = [adapter.name for adapter in result.figures.adapters if adapter.is_promoted]
    if result.handover is None or (not promoted_names and not _passed(result.handover)):
        answer = result.handover.answer.value if result.handover else "not reached"
        return f"The handover is {answer}, so {old} should stay, and nothing has changed for it. See traced explain."
    missing = [name for name in result.handover.versions if name not in result.live]
    if missing:
        return (
            f"Not live: {', '.join(missing)}. Without them nobody has compared {new} with what is live on {old}, "
            f"so {old} should stay."
        )
    remark = ""
    if result.of_other_targets:
        remark = f" For other targets, without a counterpart on {new} yet: {', '.join(result.of_other_targets)}."
    return (
        f'To hand over: set model.spec = "{new}" in traced.toml, and start traced up and traced serve again. '
        f"Live then: {', '.join(result.live) or f'{new} alone'}. The versions of {old} stay live for it: with the old "
        f"model.spec they answer again.{remark}"
    )
