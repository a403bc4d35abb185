"""Verbs of a person's decision: approve, reject, rollback."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from traced.commands.options import AsJson, DataDir, Given, Reason, Who, read_settings
from traced.commands.output import console, print_json

Adapter = Annotated[str, typer.Argument(help="Adapter version, e.g. error-recovery@v1.", show_default=False)]


def approve(
    adapter: Adapter,
    *,
    who: Who = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Approve an adapter that passed its gate and put it live."""
    from traced.commands.stored import writing
    from traced.gates import promotion

    settings = read_settings(data_dir, given)
    now, person = datetime.now(UTC), who or _user()
    with writing(settings) as opened:
        decision = promotion.approve(opened, adapter, who=person, at=now, reason=reason)
        promoted = promotion.promote(opened, adapter, who=person, at=now, reason=reason)
        live = promotion.live(opened)
    _tell(as_json, {"decision": decision, "promotion": promoted, "live": live}, f"{adapter} is approved and live")


def reject(
    adapter: Adapter,
    *,
    who: Who = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Decide against an adapter; it takes no traffic."""
    from traced.commands.stored import writing
    from traced.gates import promotion

    settings = read_settings(data_dir, given)
    with writing(settings) as opened:
        decision = promotion.reject(opened, adapter, who=who or _user(), at=datetime.now(UTC), reason=reason)
        live = promotion.live(opened)
    _tell(as_json, {"decision": decision, "live": live}, f"{adapter} is rejected")


def rollback(
    adapter: Annotated[str | None, typer.Argument(help="Default: the last promotion.", show_default=False)] = None,
    *,
    who: Who = None,
    reason: Reason = "",
    data_dir: DataDir = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Undo the last promotion, or that of one adapter."""
    from traced.commands.stored import writing
    from traced.gates import promotion

    settings = read_settings(data_dir, given)
    with writing(settings) as opened:
        undone, now_live = promotion.roll_back(opened, adapter, who=who or _user(), at=datetime.now(UTC), reason=reason)
        live = promotion.live(opened)
    told = {"rolled_back": undone, "restored": now_live, "live": live}
    _tell(as_json, told, f"{undone} is rolled back; {now_live or 'the base model'} takes over")


def _tell(as_json: bool, told: dict[str, Any], sentence: str) -> None:
    if as_json:
        print_json(told)
    else:
        console.print(f"{sentence}. Live: {', '.join(told['live']) or 'the base model only'}", highlight=False)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        import os

        return f"uid {os.getuid()}"
