"""Commands for decisions of a person: approve, reject, rollback, release.

The service that holds the data directory makes the decision; without a service the command makes it in the store.
Invariants: both use the same function of ``traced.registry.decisions``, so that audit, event and response are equal. A
running service is preferred, because it continues its cycle at once and authenticates the caller.
A rollback is an emergency: beside a service that does not answer it is made in the store, and on a full disk in the
space that is reserved for it.
How it fails: ``ServiceSilent`` if a process holds the directory and no service answers (it is starting or stopping, or
a restore or an upgrade is running); no decision is stored then. If the service refuses, its message is printed.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated

import typer
from sqlmodel import Session

from store.database import is_lock_error, limit_lock_wait, write_session
from store.errors import StoreError, StoreUnavailable
from store.repositories.requests import begin_request, end_request
from store.text import sanitize_line
from store.types import JsonObject
from traced.api.errors import problem_of, status_of
from traced.cli.options import ActorName, AsJson, DataDir, Overrides, Reason, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import opened_store, store_reader
from traced.client import Client, NoDaemon, default_socket
from traced.client.models import Done, Problem
from traced.config.settings import Settings
from traced.core.errors import PromotionError, ServiceSilent, TracedError
from traced.core.ownership import CYCLE_LOCK, SERVICE, Holder, current_holder, hold_directory, this_user
from traced.core.reserve import with_reserve
from traced.inference.model_files import base_name
from traced.registry import decisions
from traced.registry.adapter_store import upload_before_traffic
from traced.registry.decision_rules import Action, Approve, RollBack
from traced.registry.integrity import quarantining
from traced.registry.plans import plan

TIMEOUT_S, EMERGENCY_S = 30.0, 5.0  # seconds to wait for the service
LOCK_S = 10.0  # seconds to wait for a lock that a service which hangs may hold (PostgreSQL)


def decide(
    settings: Settings,
    request: Callable[[Client], Awaitable[Done]],
    decision: Callable[[Session, Action], Done],
    *,
    who: str,
    reason: str,
    prepare: Callable[[], None] = lambda: None,
    key: str = "",
) -> Done:
    """Decide by ``request`` to the service that holds the data directory, without a service by ``decision``.

    ``prepare`` is called before the transaction of ``decision``. With ``key``, the idempotency key of ``request``,
    ``decision`` is made beside a service that does not answer, and the service no longer carries ``request`` out.
    """
    owner = current_holder(settings.data_dir)
    if owner is not None:
        try:
            return asyncio.run(_ask(settings, request, EMERGENCY_S if key else TIMEOUT_S))
        except NoDaemon as error:
            if key and owner.purpose == SERVICE:
                progress.print(f"The service ({owner}) does not answer; the store is changed without it.")
                return _decide_beside(settings, owner, key, decision, _action(who, reason))
            raise ServiceSilent(
                f"the service that uses {settings.data_dir} ({owner}) does not answer; no decision was stored",
                hint="repeat the command in a moment; traced status --alive checks the service",
            ) from error
    with opened_store(settings) as store, quarantining(store, settings.notify.names, lambda: datetime.now(UTC)):
        prepare()
        with write_session(store) as session:
            return decision(session, _action(who, reason))


def _decide_beside(
    settings: Settings, owner: Holder, key: str, decision: Callable[[Session, Action], Done], action: Action
) -> Done:
    """Make a decision in the store beside a service that does not answer, once for ``key``."""
    with opened_store(settings) as store:
        try:
            with write_session(store) as session:
                limit_lock_wait(session, LOCK_S)
                response = begin_request(session, key, None, at=action.at)
                done = decision(session, action) if response is None else _first_response(response)
                end_request(session, key, done.model_dump(mode="json"))
                return done
        except StoreUnavailable as error:
            if not is_lock_error(error):
                raise
            raise ServiceSilent(
                f"the service ({owner}) does not answer and holds a lock of the store; nothing has changed",
                hint=f"let it go on with kill -CONT {owner.pid}, or end it with kill -KILL {owner.pid}, and repeat",
            ) from error
        except (PromotionError, StoreError) as error:
            # The service must not carry out later what was refused here.
            with write_session(store) as session:
                if begin_request(session, key, None, at=action.at) is None:
                    refusal = problem_of(error).model_dump()
                    end_request(session, key, {"refusal": refusal, "status": status_of(error)})
            raise


def _first_response(response: JsonObject) -> Done:
    """Return what the service has answered to a request, or raise its refusal."""
    if "refusal" in response:
        refusal = Problem.model_validate(response["refusal"])
        raise PromotionError(refusal.message, hint=refusal.hint)
    return Done.model_validate(response)


def _action(who: str, reason: str) -> Action:
    user = this_user()
    return Action(user, "local", datetime.now(UTC), reason, "" if who == user else who)


async def _ask(settings: Settings, request: Callable[[Client], Awaitable[Done]], timeout_s: float) -> Done:
    async with Client(default_socket(settings.data_dir), timeout_s=timeout_s) as client:
        return await request(client)


Subject = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER|PROMPT",
        help="Adapter version, e.g. error-recovery@v1, or first digits of a prompt patch (traced prompts).",
        show_default=False,
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help='"immediate", "canary" or "shadow" (default: promotion.policy in the settings).',
        show_default=False,
    ),
]


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Tag = Annotated[
    str,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Tag from an error message; the decision is refused if the state has changed since.",
        show_default=False,
    ),
]


def approve(
    adapter: Subject,
    *,
    policy: PolicyOption = None,
    yes: Yes = False,
    tag: Tag = "",
    who: ActorName = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Approve an adapter that passed its gate, which then takes traffic; or record the approval of a prompt."""
    settings = read_settings(data_dir, overrides, promotion__policy=policy)
    if _is_prompt(adapter):
        if policy:
            raise typer.BadParameter(
                "can only be used with an adapter; a prompt takes no traffic", param_hint="--policy"
            )
        done = decide(
            settings,
            lambda client: client.prompts.approve(adapter, reason, who, tag=tag),
            lambda session, action: decisions.approve_prompt(session, action, adapter, tag=tag),
            who=who,
            reason=reason,
        )
        _print(as_json, done, f"traced show patch {done.subject[:12]} --into FILE writes its text")
        return
    promotion = settings.promotion
    request = Approve(promotion.policy, promotion.steps)
    _, current = _confirmed(settings, request, adapter, "Approve", yes=yes, as_json=as_json)
    tag = tag or current
    done = decide(
        settings,
        lambda client: client.approve(adapter, reason, who, promotion.policy if policy else None, tag=tag),
        lambda session, action: decisions.approve(session, action, adapter, promotion.policy, promotion.steps, tag=tag),
        who=who,
        reason=reason,
        prepare=lambda: _upload(settings, adapter),
    )
    _print(as_json, done)


def reject(
    adapter: Subject,
    *,
    tag: Tag = "",
    who: ActorName = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Reject an adapter, which then takes no traffic, or a prompt."""
    if _is_prompt(adapter):
        done = decide(
            read_settings(data_dir, overrides),
            lambda client: client.prompts.reject(adapter, reason, who, tag=tag),
            lambda session, action: decisions.reject_prompt(session, action, adapter, tag=tag),
            who=who,
            reason=reason,
        )
        _print(as_json, done, "traced prompts")
        return
    done = decide(
        read_settings(data_dir, overrides),
        lambda client: client.reject(adapter, reason, who, tag=tag),
        lambda session, action: decisions.reject(session, action, adapter, tag=tag),
        who=who,
        reason=reason,
    )
    _print(as_json, done)


def rollback(
    adapter: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADAPTER]", help="Adapter version (default: that of the last promotion).", show_default=False
        ),
    ] = None,
    *,
    yes: Yes = False,
    who: ActorName = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Undo the last promotion, or the promotion of the named adapter."""
    settings, key = read_settings(data_dir, overrides), uuid.uuid4().hex

    def roll_back() -> Done:
        name, tag = _confirmed(settings, RollBack(), adapter, "Roll back", yes=yes, as_json=as_json)
        return decide(
            settings,
            lambda client: client.roll_back(name, reason, who, tag=tag, key=key),
            lambda session, action: decisions.roll_back(session, action, name, tag=tag),
            who=who,
            reason=reason,
            key=key,
        )

    done = with_reserve(settings.store_url, roll_back)
    _print(as_json, done)


def release(
    input_id: Annotated[
        str, typer.Argument(metavar="INPUT", help="Id of the quarantined input (traced status).", show_default=False)
    ],
    *,
    who: ActorName = "",
    reason: Reason = "",
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Release a quarantined input: the service retries it."""
    done = decide(
        read_settings(data_dir, overrides),
        lambda client: client.release(input_id, reason, who),
        lambda session, action: decisions.release(session, action, input_id),
        who=who,
        reason=reason,
    )
    _print(as_json, done, "traced status")


def cancel_cycle(settings: Settings, cycle_id: str, reason: str) -> Done:
    """End an unfinished cycle; raises ``AlreadyRunning`` if a command works on a cycle."""

    def cancel(session: Session, action: Action) -> Done:
        with hold_directory(
            settings.data_dir, now=lambda: datetime.now(UTC), version=version("traced"), file_name=CYCLE_LOCK
        ):
            return decisions.cancel(session, action, cycle_id)

    return decide(settings, lambda client: client.cancel(cycle_id, reason), cancel, who="", reason=reason)


def _confirmed(
    settings: Settings, request: Approve | RollBack, adapter: str | None, verb: str, *, yes: bool, as_json: bool
) -> tuple[str, str]:
    """Show what a decision would do and ask for confirmation; return the version and the tag of the state summary.

    Without a question (``yes``, or nothing would change) the tag is "": nobody has read the state.
    """
    with store_reader(settings) as session:
        summary = plan(session, request, adapter, base_name(settings))
    printer = progress if as_json else console
    printer.print(sanitize_line(summary.adapter), highlight=False, markup=False)
    for line in summary.lines:
        printer.print(f"  {sanitize_line(line, limit=1000)}", highlight=False, markup=False, soft_wrap=True)
    if yes or not summary.changes:
        return summary.adapter, ""
    try:
        is_confirmed = typer.confirm(f"{verb} {summary.adapter}?", err=as_json)
    except typer.Abort:
        is_confirmed = False
    if not is_confirmed:
        raise TracedError(
            "nothing has changed: the decision was not confirmed", hint="--yes decides without a question"
        )
    return summary.adapter, summary.tag


def _upload(settings: Settings, adapter: str) -> None:
    with opened_store(settings) as store:
        upload_before_traffic(settings.serving.adapters_root, store, [adapter])


def _is_prompt(name: str) -> bool:
    """Whether the name consists of hexadecimal digits, as the id of a prompt patch; an adapter's name has an @."""
    return re.fullmatch("[0-9a-f]{1,64}", name, re.IGNORECASE) is not None


def _print(as_json: bool, done: Done, next_step: str = "") -> None:
    """Print the decision, and the next command or, without one, the live adapters."""
    if as_json:
        report = done.model_dump(mode="json")
        print_json({**report, **report.pop("detail")})
        return
    ending = f"Next: {next_step}" if next_step else f"Live: {', '.join(done.live) or 'the base model only'}"
    console.print(f"{sanitize_line(done.message)}. {ending}", highlight=False, markup=False)
