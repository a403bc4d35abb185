"""The router in words: what it does of late (``traced status``), and one conversation (``traced show conversation``).

Nothing heavy is imported at module level: ``traced status`` answers at once. Texts of people and of clients are shown
quoted, so that no control character of theirs reaches the terminal.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traced.location import plain_setting
from traced.serving.fitted import serving_file

if TYPE_CHECKING:
    from store.repositories.traffic import Conversation
    from store.standing import Standing

SPOOLED = "exchanges-*.jsonl"  # the files of ``traced.serving.gateway.spool``
DAMAGED = "damaged.jsonl"  # and of ``storing``
LATE_S = 10.0


def router_told(stands: "Standing", data_dir: Path, given: str | None) -> dict[str, Any]:
    """The router's part of ``traced status --json``; ``given`` is the command line's ``routing.router``."""
    return {
        **asdict(stands.router),
        "spool": _spool(data_dir / "spool"),
        "decided_by": _decided_by(stands, data_dir, given),
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


def _decided_by(stands: "Standing", data_dir: Path, given: str | None) -> str:
    """What gives conversations to the live adapters; "" where none is live."""
    if not stands.live:
        return ""
    if plain_setting(data_dir, "routing", "router", given) == "labels":
        return "label tokens, as routing.router says"
    path = serving_file(data_dir, stands.fitting, stands.live)
    if path is None:
        names = f"{', '.join(stands.live)}{' together' if len(stands.live) > 1 else ''}"
        return f"label tokens: no router was fitted for {names}; a cycle that promotes something does it"
    return f"the router that {path.parent.name} has fitted"


def _spool(folder: Path) -> dict[str, Any]:
    now, ages = time.time(), []
    for path in folder.glob(SPOOLED):
        try:
            ages.append(now - path.stat().st_mtime)
        except FileNotFoundError:  # stored meanwhile
            continue
    try:
        with (folder / DAMAGED).open("rb") as opened:
            damaged = sum(1 for _ in opened)
    except FileNotFoundError:
        damaged = 0
    return {"files": len(ages), "oldest_s": round(max(ages, default=0.0), 1), "damaged": damaged}


def _waiting(spool: Mapping[str, Any]) -> Iterator[str]:
    if spool["oldest_s"] > LATE_S:
        what = f"{spool['files']} files of conversations, the oldest for {spool['oldest_s']:.0f} s"
        yield f"Wait to be stored: {what}. traced serve brings them into the store, while it answers"
    if spool["damaged"]:
        yield f"Could not be read: {spool['damaged']} recorded exchanges, kept in spool/{DAMAGED}"


def _counts(counted: Mapping[Any, int], prefix: str = "") -> str:
    return ", ".join(f"{count} {prefix}{name}" for name, count in counted.items())
