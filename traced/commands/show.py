"""Verbs that only look: status, explain, show conversation; show takes in those of other modules."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.commands.decide import Adapter
from traced.commands.environments import environment
from traced.commands.options import AsJson, DataDir, Given, parse_pair, read_settings
from traced.commands.output import console, print_json
from traced.commands.prompts import patch

if TYPE_CHECKING:
    from store.standing import CostStanding, PatchStanding

show = typer.Typer(no_args_is_help=True, help="Show one thing in full.")
show.command()(patch)
show.command()(environment)

ENOUGH = "a prompt is enough"  # as traced.prompting.enough says it, which takes longer to import than status may

Alive = Annotated[bool, typer.Option("--alive", help="Only ask whether the service answers; exit code 1: no.")]


def status(
    *,
    alive: Alive = False,
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Show the cycles, what waits for a decision or is parked, what is live, and what the router does."""
    if alive:
        _alive(data_dir, as_json)
        return
    from store.standing import standing
    from traced.commands.router import router_lines, router_told

    directory, url = _place(data_dir, given)
    stands = standing(url)
    router = router_told(stands, directory, dict(parse_pair(pair) for pair in given or []).get("routing.router"))
    cycles = [
        {"cycle": one.id, "target": one.target, "model": one.model, "state": one.state, "last stage": one.last_stage}
        for one in stands.cycles
    ]
    adapters = [
        {
            "adapter": one.name,
            "gate": one.gate,
            "decision": one.decision,
            "traffic": one.traffic,
            "conversations": one.conversations,
        }
        for one in stands.adapters
    ]
    if as_json:
        told: dict[str, Any] = {"cycles": cycles, "adapters": adapters, "live": stands.live, "waiting": stands.waiting}
        service = {"paused": stands.paused, "asked_for": stands.asked_for, "cannot_begin": stands.cannot_begin}
        print_json(
            {
                "data_dir": directory,
                **told,
                "parked": stands.parked,
                "held_up": stands.held_up,
                "costs": stands.costs,
                "prompts": stands.patches,
                **service,
                "router": router,
            }
        )
        return
    _table("Cycles", ["cycle", "target", "model", "state", "last stage"], cycles)
    if stands.costs:
        costs = [_cost(one) for one in stands.costs]
        _table("Language model", ["cycle", "stage", "calls", "tokens", "cost", "seconds"], costs)
    _table("Adapters", ["adapter", "gate", "decision", "traffic", "conversations"], adapters, conversations="in tests")
    for line in router_lines(router):
        console.print(line, highlight=False, markup=False)
    for name in stands.waiting:
        console.print(f"Waits for a decision: traced explain {name}, then traced approve {name}", highlight=False)
    for tried in stands.patches:
        if tried.enough == ENOUGH:
            console.print(_offer(tried), highlight=False, markup=False)
    for target, cause in stands.asked_for.items():
        when = "It begins when nothing of the above is unfinished, the service runs and nobody has paused it"
        console.print(f"To begin: a cycle of {target}, {cause}. {when}", highlight=False, markup=False)
    for target, why in stands.cannot_begin.items():
        console.print(f"A cycle of {target} is due and cannot begin: {why}", highlight=False, markup=False)
    for target, who in stands.paused.items():
        console.print(f"Paused: {target}, by {who}. To go on: traced resume", highlight=False, markup=False)
    for late in stands.held_up:
        what = f"{late.stage} of {late.capability or late.cycle} ({late.reason})"
        console.print(f"Held up: {what}. It is tried again by itself; traced doctor", highlight=False, markup=False)
    for one in stands.parked:
        what = f"{one.stage} of {one.capability or one.cycle}, tried {one.tried} times ({one.reason})"
        console.print(f"Parked: {what}. To have it tried again: traced release {one.id}", highlight=False, markup=False)


def explain(adapter: Adapter, data_dir: DataDir = None, given: Given = None, as_json: AsJson = False) -> None:
    """Print the whole chain of evidence behind an adapter."""
    from store.repositories.evidence import evidence_chain
    from store.repositories.promotions import shares
    from store.repositories.thinking import list_patches
    from traced.commands.chain import chain_lines
    from traced.commands.stored import looking
    from traced.gates.trials import judge
    from traced.outcomes.evidence import Labels, judged_by
    from traced.prompting.decisions import decisions
    from traced.prompting.patches import SHORT, enough
    from traced.serving.gateway.canaries import strata

    settings = read_settings(data_dir, given)
    with looking(settings) as opened:
        chain = evidence_chain(opened, adapter)
        labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
        judged = judged_by(opened, [one.id for one in chain.trajectories], labels)
        patches = list_patches(opened, cycle_id=chain.cycle.id, capability=chain.capability.name)
        decided = decisions(opened)
        canary = judge(strata(opened, adapter, labels), settings.promotion).why if shares(opened, adapter) else ""
    if as_json:
        said = [decided[one.id] for one in patches if one.id in decided]
        told = {"prompt_patches": patches, "prompt_decisions": said}
        print_json(vars(chain) | {"judged_by": judged, "canary": canary} | told)
        return
    for line in chain_lines(chain, judged):
        console.print(line, highlight=False, markup=False)
    for one in patches[-1:]:
        by = f"; {decided[one.id]}" if one.id in decided else ""
        says = f"{enough(one)}: traced show patch {one.id[:SHORT]}{by}"
        console.print(f"prompt       {says}", highlight=False, markup=False)
    if canary:
        console.print(f"canary       {canary}", highlight=False, markup=False)


@show.callback()
def show_options() -> None:
    """Show one thing in full."""


@show.command()
def conversation(
    named: Annotated[
        str, typer.Argument(metavar="ID", help="Of a conversation (X-Traced-Conversation), or of an answer in it.")
    ],
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Show what the router decided on a conversation, what was exchanged, and what people thought of it."""
    from store.repositories.traffic import get_conversation
    from traced.commands.router import conversation_lines
    from traced.commands.stored import looking

    with looking(read_settings(data_dir, given)) as opened:
        found = get_conversation(opened, named)
    if as_json:
        print_json(found)
        return
    for line in conversation_lines(found):
        console.print(line, highlight=False, markup=False)


def _alive(data_dir: Path | None, as_json: bool) -> None:
    from traced.host.alive import ask_alive
    from traced.location import data_directory, default_socket

    ask_alive(default_socket(data_directory(data_dir)))
    if as_json:
        print_json({"alive": True})
    else:
        console.print("The service answers.", highlight=False)


def _place(data_dir: Path | None, given: list[str] | None) -> tuple[Path, str]:
    """The data directory and its store's URL, without reading (and importing) all settings where that is not needed."""
    from traced.errors import TracedError
    from traced.location import data_directory, default_url, store_url

    pairs = dict(parse_pair(pair) for pair in given or [])
    directory = data_directory(data_dir)
    if set(pairs) - {"store.url"}:
        url = read_settings(data_dir, given).store_url  # the other keys are checked
    else:
        url = store_url(directory, pairs.get("store.url"))
    if url == default_url(directory) and not (directory / "traced.db").exists():
        raise TracedError(f"{directory} holds no store yet", hint="traced demo, or traced collect")
    return directory, url


def _cost(one: "CostStanding") -> dict[str, Any]:
    about = "~" if one.estimated else ""
    tokens = f"{about}{one.prompt_tokens:,} + {about}{one.completion_tokens:,}"
    figures = {"calls": one.calls, "tokens": tokens, "cost": f"{about}{one.cost:.4g}", "seconds": f"{one.seconds:.0f}"}
    return {"cycle": one.cycle, "stage": one.stage, **figures}


def _offer(tried: "PatchStanding") -> str:
    """A prompt that is enough, and what was decided on it or how to decide."""
    from store.plain import line

    short = tried.id[:12]
    if tried.decision != "none":
        return f"A prompt is enough for {tried.capability}: {short}, {tried.decision} by {line(tried.who)}"
    taken = f"traced show patch {short} --into FILE takes it, traced approve {short} says so"
    return f"A prompt is enough for {tried.capability}: {taken}"


def _table(title: str, columns: list[str], rows: list[dict[str, Any]], **headings: str) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(headings.get(column, column))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
