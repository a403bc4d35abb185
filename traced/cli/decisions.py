"""Verbs of a person's decision: approve, reject, rollback, release.

A decision of the command line: asked of the service that holds the data directory, else made in the store.

Invariants: the one function of ``traced.registry.decisions`` decides either way, so that audit, event and answer are
the same; a service is asked, because it goes on at once and knows who asks.
How it fails: ``ServiceSilent`` when somebody holds the directory and no service answers (it starts or stops just now,
or a restore or an upgrade is at work): nothing was decided then. What the service refuses is said in its own words.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated

import typer
from sqlmodel import Session

from traced.cli.options import AsJson, DataDir, Given, Reason, Who, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import changing
from traced.client import Client, NoDaemon, default_socket
from traced.client.models import Done
from traced.config.settings import Settings
from traced.core.errors import ServiceSilent
from traced.core.ownership import holder, this_user
from traced.registry.decisions import Act


def decided(
    settings: Settings,
    ask: Callable[[Client], Awaitable[Done]],
    make: Callable[[Session, Act], Done],
    *,
    who: str,
    reason: str,
) -> Done:
    """What was decided: by ``ask`` where a service holds the data directory, else by ``make``."""
    held_by = holder(settings.data_dir)
    if held_by is not None:
        try:
            return asyncio.run(_asked(settings, ask))
        except NoDaemon as error:
            raise ServiceSilent(
                f"{settings.data_dir} is held by {held_by}, which does not answer; nothing was decided",
                hint="the same command again in a moment",
            ) from error
    user = this_user()
    with changing(settings) as opened:
        act = Act(who or user, "local", datetime.now(UTC), reason, by="" if who in ("", user) else user)
        return make(opened, act)


async def _asked(settings: Settings, ask: Callable[[Client], Awaitable[Done]]) -> Done:
    async with Client(default_socket(settings.data_dir)) as client:
        return await ask(client)


Decided = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER|PROMPT",
        help="Adapter version, e.g. error-recovery@v1, or the first digits of a prompt (traced prompts).",
        show_default=False,
    ),
]
Adapter = Annotated[str, typer.Argument(help="Adapter version, e.g. error-recovery@v1.", show_default=False)]

HowLive = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help='"immediate", "canary" or "shadow" (default: promotion.policy of the settings).',
        show_default=False,
    ),
]


def approve(
    adapter: Decided,
    *,
    policy: HowLive = None,
    who: Who = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Approve an adapter that passed its gate and put it live, at once or step by step; or a prompt that is enough."""
    from traced.registry import decisions

    settings = read_settings(data_dir, given, promotion__policy=policy)
    if _is_prompt(adapter):
        if policy:
            raise typer.BadParameter("goes with an adapter; a prompt takes no traffic", param_hint="--policy")
        done = decided(
            settings,
            lambda client: client.prompts.approve(adapter, reason, who),
            lambda opened, act: decisions.approve_prompt(opened, act, adapter),
            who=who,
            reason=reason,
        )
        _tell_of_prompt(as_json, done, f"traced show patch {done.subject[:12]} --into FILE takes its text")
        return
    chosen = settings.promotion
    done = decided(
        settings,
        lambda client: client.approve(adapter, reason, who, chosen.policy if policy else None),
        lambda opened, act: decisions.approve(opened, act, adapter, chosen.policy, chosen.steps),
        who=who,
        reason=reason,
    )
    _tell(as_json, done)


def reject(
    adapter: Decided,
    *,
    who: Who = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Decide against an adapter, which takes no traffic, or against a prompt."""
    from traced.registry import decisions

    if _is_prompt(adapter):
        done = decided(
            read_settings(data_dir, given),
            lambda client: client.prompts.reject(adapter, reason, who),
            lambda opened, act: decisions.reject_prompt(opened, act, adapter),
            who=who,
            reason=reason,
        )
        _tell_of_prompt(as_json, done, "traced prompts")
        return
    done = decided(
        read_settings(data_dir, given),
        lambda client: client.reject(adapter, reason, who),
        lambda opened, act: decisions.reject(opened, act, adapter),
        who=who,
        reason=reason,
    )
    _tell(as_json, done)


def rollback(
    adapter: Annotated[str | None, typer.Argument(help="Default: the last promotion.", show_default=False)] = None,
    *,
    who: Who = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Undo the last promotion, or that of one adapter."""
    from traced.registry import decisions

    done = decided(
        read_settings(data_dir, given),
        lambda client: client.roll_back(adapter, reason, who),
        lambda opened, act: decisions.roll_back(opened, act, adapter),
        who=who,
        reason=reason,
    )
    _tell(as_json, done)


def release(
    parked: Annotated[str, typer.Argument(help="Id of the parked input (traced status).", show_default=False)],
    *,
    who: Who = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Let an input that failed too often be tried again."""
    from traced.registry import decisions

    done = decided(
        read_settings(data_dir, given),
        lambda client: client.release(parked, reason, who),
        lambda opened, act: decisions.release(opened, act, parked),
        who=who,
        reason=reason,
    )
    if as_json:
        _tell(as_json, done)
    else:
        _say(done, "Next: traced status")


def _is_prompt(name: str) -> bool:
    """Digits of an id; an adapter's name has its version behind an @."""
    return re.fullmatch("[0-9a-f]{1,64}", name, re.IGNORECASE) is not None


def _tell_of_prompt(as_json: bool, done: "Done", following: str) -> None:
    if as_json:
        _tell(as_json, done)
    else:
        _say(done, f"Next: {following}")


def _tell(as_json: bool, done: "Done") -> None:
    if as_json:
        told = done.model_dump(mode="json")
        print_json({**told, **told.pop("detail")})
    else:
        _say(done, f"Live: {', '.join(done.live) or 'the base model only'}")


def _say(done: "Done", more: str) -> None:
    from store.text import line

    console.print(f"{line(done.said)}. {more}", highlight=False, markup=False)
