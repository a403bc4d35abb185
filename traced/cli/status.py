"""Verbs that only look: status, explain, show conversation; show takes in those of other modules.

The router in words: what it does of late (``traced status``), and one conversation (``traced show conversation``).

Nothing heavy is imported at module level: ``traced status`` answers at once. Texts of people and of clients are shown
quoted, so that no control character of theirs reaches the terminal.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.cli.decisions import Adapter
from traced.cli.evidence import patch
from traced.cli.options import AsJson, DataDir, Given, parse_pair, read_settings
from traced.cli.output import console, print_json
from traced.cli.show import environment
from traced.core.location import plain_setting
from traced.gateway.spool_status import DAMAGED, spooled
from traced.routing.router_files import decided_by

if TYPE_CHECKING:
    from store.repositories.traffic import Conversation
    from store.status import CostStanding, PatchStanding, Standing


LATE_S = 10.0


def router_told(stands: "Standing", data_dir: Path, given: str | None) -> dict[str, Any]:
    """The router's part of ``traced status --json``; ``given`` is the command line's ``routing.router``."""
    by_labels = bool(stands.live) and plain_setting(data_dir, "routing", "router", given) == "labels"
    return {
        **asdict(stands.router),
        "spool": asdict(spooled(data_dir / "spool")),
        "decided_by": decided_by(data_dir, stands.fitting, stands.live, by_labels=by_labels),
    }


def router_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """What of it a person should read; nothing where there is no router."""
    if told["decided_by"]:
        yield f"Conversations are decided by {told['decided_by']}"
    if told["day"]:
        hour = told["hour"]
        each = ", ".join(f"{count} {model} ({hour.get(model, 0)})" for model, count in told["day"].items())
        yield f"Conversations of the last day (hour): {each}{'; and more before' if told['partial'] else ''}"
    if told["failures"]:
        yield f"Requests that failed in the last day: {_counts(told['failures'], 'with status ')}"
    for reason, count in told["by_default"].items():
        yield f"Left to the base model in the last day: {count}, because {json.dumps(reason)}"
    if told["feedback"]:
        yield f"Feedback of the last day: {_counts(told['feedback'])}"
    if told["outcomes"]:
        yield f"Trajectories of production: {_counts(told['outcomes'])}"
    if told["unsettled"]:
        yield f"Conversations that go on, or were silent for too short a time: {told['unsettled']} exchanges"
    yield from _waiting(told["spool"])


def _plain(name: str) -> str:
    """A name that a client chose, without what a terminal would obey."""
    return name if name.isprintable() else json.dumps(name)


def conversation_lines(found: "Conversation") -> Iterator[str]:
    """The decision, the exchanges, the feedback, and what has become of it."""
    yield f"conversation {found.id}"
    route = found.route
    if route is None:
        yield "decision     none: a model was asked for by name, or no adapter was live"
    else:
        because = f", because {json.dumps(route.why)}" if route.why else ""
        yield f"decision     {route.model}, {route.at:%Y-%m-%d %H:%M:%S} UTC, in {1000 * route.seconds:.1f} ms{because}"
        for model, logprob in sorted(route.logprobs.items(), key=lambda one: -one[1]):
            yield f"             {model}: log-prob {logprob:.3f}, {100 * math.exp(logprob):.1f} %"
    for one in found.exchanges:
        tokens = f"{one.prompt_tokens} + {one.completion_tokens} tokens"
        told = f" {json.dumps(one.detail[:200])}" if one.detail else ""
        became = f", part of {one.trajectory_id}" if one.trajectory_id else ""
        when = f"{one.at:%Y-%m-%d %H:%M:%S} UTC"
        took = f"{_plain(one.model)}, status {one.status}, {one.seconds:.2f} s"
        yield f"exchange     {when}: {took}, {tokens}{became}{told}"
    for said in found.feedback:
        named = {"by": said.who, "on": said.response_id, "label": said.label, "comment": said.comment}
        parts = [f"score {said.score:g}"] if said.score is not None else []
        parts += [f"{name} {json.dumps(text)}" for name, text in named.items() if text]
        yield f"feedback     {said.at:%Y-%m-%d %H:%M:%S} UTC: {', '.join(parts)}"
    for trajectory in found.trajectories:
        what = f"{trajectory.outcome}, reward {trajectory.reward:g}, {len(trajectory.messages)} messages"
        yield f"trajectory   {trajectory.id}: {_plain(trajectory.model)}, {what}"
    if not found.trajectories:
        yield "trajectory   none yet: it is made when the conversation has been silent for serving.silence_s"


def _waiting(spool: Mapping[str, Any]) -> Iterator[str]:
    if spool["oldest_s"] > LATE_S:
        what = f"{spool['files']} files of conversations, the oldest for {spool['oldest_s']:.0f} s"
        yield f"Wait to be stored: {what}. traced serve brings them into the store, while it answers"
    if spool["damaged"]:
        yield f"Could not be read: {spool['damaged']} recorded exchanges, kept in spool/{DAMAGED}"


def _counts(counted: Mapping[Any, int], prefix: str = "") -> str:
    return ", ".join(f"{count} {prefix}{name}" for name, count in counted.items())


show = typer.Typer(no_args_is_help=True, help="Show one thing in full.")
show.command()(patch)
show.command()(environment)

ENOUGH = (
    "a prompt is enough"  # as traced.prompt_optimization.patches says it, which takes longer to import than status may
)

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
    from store.status import standing

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
    from store.repositories.llm_replies import list_patches
    from store.repositories.promotions import shares
    from traced.cli.evidence import chain_lines
    from traced.cli.store_session import looking
    from traced.gateway.canaries import strata
    from traced.prompt_optimization.patches import SHORT, enough
    from traced.registry.canary import judge
    from traced.registry.decisions import prompt_decisions
    from traced.scoring.evidence import Labels, judged_by

    settings = read_settings(data_dir, given)
    with looking(settings) as opened:
        chain = evidence_chain(opened, adapter)
        labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
        judged = judged_by(opened, [one.id for one in chain.trajectories], labels)
        patches = list_patches(opened, cycle_id=chain.cycle.id, capability=chain.capability.name)
        decided = prompt_decisions(opened)
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
    from traced.cli.store_session import looking

    with looking(read_settings(data_dir, given)) as opened:
        found = get_conversation(opened, named)
    if as_json:
        print_json(found)
        return
    for line in conversation_lines(found):
        console.print(line, highlight=False, markup=False)


def _alive(data_dir: Path | None, as_json: bool) -> None:
    from traced.core.liveness import ask_alive
    from traced.core.location import data_directory, default_socket

    ask_alive(default_socket(data_directory(data_dir)))
    if as_json:
        print_json({"alive": True})
    else:
        console.print("The service answers.", highlight=False)


def _place(data_dir: Path | None, given: list[str] | None) -> tuple[Path, str]:
    """The data directory and its store's URL, without reading (and importing) all settings where that is not needed."""
    from traced.core.errors import TracedError
    from traced.core.location import data_directory, default_url, store_url

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
    from store.text import line

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
