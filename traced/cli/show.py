"""The commands show patch, show environment and show conversation: print one stored object in full.

Invariants: texts of a model, an environment or a client are quoted or escaped, so that none of their control characters
reaches the terminal; ``--into`` writes a source unchanged. How it fails: ``NoSuchEnvironment`` for a hash that matches
no environment or several.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from store.records import EnvironmentRecord, EnvironmentSummary
from store.repositories.environments import list_admissions, list_origins, newest_environments
from store.repositories.traffic import Conversation, get_conversation
from store.text import sanitize_line
from traced.cli.evidence import patch
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json, write_new_file
from traced.cli.store_session import store_reader
from traced.interop.origin import origin_of_hash

LIST_LIMIT = 100
HASH_DIGITS = 12  # printed digits of a hash, enough to be unique

show = typer.Typer(no_args_is_help=True, help="Show one environment, prompt patch or conversation in full.")
show.command()(patch)


@show.callback()
def show_options() -> None:
    """Show one environment, prompt patch or conversation in full."""


@show.command()
def environment(
    digits: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENV]",
            help=f"Hash of the environment (env:1a2b...). Default: list the newest {LIST_LIMIT}.",
            show_default=False,
        ),
    ] = None,
    *,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE.py", help="Write its source to this file.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show an environment, admitted or refused: its author, the environment it repairs, and the admission report."""
    # Imports the Docker SDK, which the other commands do not need.
    from sandbox.admission.report import as_data, on_terminal

    settings = read_settings(data_dir, overrides)
    if digits is None:
        if into is not None:
            raise typer.BadParameter("can only be used with an environment", param_hint="--into")
        with store_reader(settings) as session:
            environments = newest_environments(session, limit=LIST_LIMIT)
        _list(environments, as_json)
        return
    with store_reader(settings) as session:
        hash_ = origin_of_hash(session, digits).hash
        origins, admissions = list_origins(session, hash_), list_admissions(session, hash_)
    if into is not None:
        write_new_file(into, origins[0].source_code)
    if as_json:
        reports = [{"cycle": row.cycle_id, "at": row.at, **as_data(row.report)} for row in admissions]
        print_json(_as_json(origins, reports) | ({"file": into.absolute()} if into is not None else {}))
        return
    for text in _origin_lines(origins):
        console.print(text, highlight=False, markup=False)
    if admissions:
        Console().print(on_terminal(admissions[-1].report, f"env:{hash_[:HASH_DIGITS]}"))
    else:
        next_step = f"traced admit {origins[-1].capability}"
        console.print(f"No admission has checked it yet. Next: {next_step}", highlight=False, markup=False)
    if into is not None:
        next_step = f"To check the file after a change: traced admit {into}"
        console.print(f"Wrote the source to {into}. {next_step}", highlight=False)
    else:
        console.print(
            f"To write its source to a file: traced show environment env:{hash_[:HASH_DIGITS]} --into FILE.py",
            highlight=False,
        )


def _list(environments: Sequence[EnvironmentSummary], as_json: bool) -> None:
    if as_json:
        print_json({"environments": environments})
        return
    if not environments:
        console.print("No environment exists yet. Next: traced synthesize", highlight=False)
        return
    name = Column("environment", no_wrap=True, min_width=len("env:") + HASH_DIGITS)  # users copy it
    table = Table(name, "capability", "cycle", "by", "admission", "written")
    for row in environments:
        admission = "not checked" if row.admitted is None else "admitted" if row.admitted else ", ".join(row.failed)
        timestamp = f"{row.at:%Y-%m-%d %H:%M}"
        table.add_row(
            f"env:{row.hash[:HASH_DIGITS]}", row.capability, row.cycle_id, row.synthesizer, admission, timestamp
        )
    console.print(table)
    if len(environments) == LIST_LIMIT:
        console.print(f"Only the newest {LIST_LIMIT} are listed.", highlight=False)
    console.print("To see why an environment was refused: traced show environment env:...", highlight=False)


def _as_json(origins: Sequence[EnvironmentRecord], admissions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    origin_rows = [
        {
            "cycle": row.cycle_id,
            "capability": row.capability,
            "synthesizer": row.synthesizer,
            "seed": row.seed,
            "repairs": row.repairs,
            "at": row.at,
        }
        for row in origins
    ]
    first = origins[0]
    return {
        "environment": first.hash,
        "origins": origin_rows,
        "admissions": admissions,
        "source": first.source_code,
    }


def _origin_lines(origins: Sequence[EnvironmentRecord]) -> Iterator[str]:
    for row in origins:
        repair = f", a repair of env:{row.repairs[:HASH_DIGITS]}" if row.repairs else ""
        author = f"by the {row.synthesizer} synthesizer with seed {row.seed}{repair}"
        yield f"{sanitize_line(row.capability)}: written {author}, in cycle {row.cycle_id}, {row.at:%Y-%m-%d %H:%M} UTC"


@show.command()
def conversation(
    conversation_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Id of a conversation (header X-Traced-Conversation) or of a response in it."
        ),
    ],
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a conversation of the router: routing decision, requests, feedback and trajectory."""
    with store_reader(read_settings(data_dir, overrides)) as session:
        record = get_conversation(session, conversation_id)
    if as_json:
        print_json(record)
        return
    for text in conversation_lines(record):
        console.print(text, highlight=False, markup=False)


def conversation_lines(conversation: Conversation) -> Iterator[str]:
    """Yield the routing decision, the exchanges, the feedback, and the resulting trajectories."""
    yield f"conversation {conversation.id}"
    route = conversation.route
    if route is None:
        yield "decision     none: the client named a model, or no adapter was live"
    else:
        reason = f", reason {json.dumps(route.why)}" if route.why else ""
        yield f"decision     {route.model}, {route.at:%Y-%m-%d %H:%M:%S} UTC, in {1000 * route.seconds:.1f} ms{reason}"
        for model, logprob in sorted(route.logprobs.items(), key=lambda item: -item[1]):
            yield f"             {model}: log-prob {logprob:.3f}, {100 * math.exp(logprob):.1f} %"
    for exchange in conversation.exchanges:
        tokens = f"{exchange.prompt_tokens} + {exchange.completion_tokens} tokens"
        detail = f" {json.dumps(exchange.detail[:200])}" if exchange.detail else ""
        trajectory_id = f", part of {exchange.trajectory_id}" if exchange.trajectory_id else ""
        time = f"{exchange.at:%Y-%m-%d %H:%M:%S} UTC"
        call = f"{_quoted(exchange.model)}, status {exchange.status}, {exchange.seconds:.2f} s"
        yield f"exchange     {time}: {call}, {tokens}{trajectory_id}{detail}"
    for feedback in conversation.feedback:
        texts = {
            "by": feedback.who,
            "on": feedback.response_id,
            "label": feedback.label,
            "comment": feedback.comment,
        }
        parts = [f"score {feedback.score:g}"] if feedback.score is not None else []
        parts += [f"{name} {json.dumps(text)}" for name, text in texts.items() if text]
        yield f"feedback     {feedback.at:%Y-%m-%d %H:%M:%S} UTC: {', '.join(parts)}"
    for trajectory in conversation.trajectories:
        result = f"{trajectory.outcome}, reward {trajectory.reward:g}, {len(trajectory.messages)} messages"
        split = f", {trajectory.split}" if trajectory.split else ""
        customer = f", {trajectory.customer}" if trajectory.customer else ""
        start = f", began {trajectory.started_at:%Y-%m-%d %H:%M:%S} UTC" if trajectory.started_at else ""
        yield f"trajectory   {trajectory.id}: {_quoted(trajectory.model)}, {result}"
        yield f"             of {sanitize_line(trajectory.source)}{split}{customer}{start}"
    if not conversation.trajectories:
        yield "trajectory   none yet: it is created serving.silence_s seconds after the last request"


def _quoted(name: str) -> str:
    """Return a name that a client chose, escaped if it contains control characters."""
    return name if name.isprintable() else json.dumps(name)
