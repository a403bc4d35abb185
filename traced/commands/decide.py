"""Verbs of a person's decision: approve, reject, rollback, release."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from traced.commands.options import AsJson, DataDir, Given, Reason, Who, read_settings
from traced.commands.output import console, print_json

if TYPE_CHECKING:
    from traced.client.models import Done

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
    from traced import acts
    from traced.commands.acting import decided

    settings = read_settings(data_dir, given, promotion__policy=policy)
    if _is_prompt(adapter):
        if policy:
            raise typer.BadParameter("goes with an adapter; a prompt takes no traffic", param_hint="--policy")
        done = decided(
            settings,
            lambda client: client.prompts.approve(adapter, reason, who),
            lambda opened, act: acts.approve_prompt(opened, act, adapter),
            who=who,
            reason=reason,
        )
        _tell_of_prompt(as_json, done, f"traced show patch {done.subject[:12]} --into FILE takes its text")
        return
    chosen = settings.promotion
    done = decided(
        settings,
        lambda client: client.approve(adapter, reason, who, chosen.policy if policy else None),
        lambda opened, act: acts.approve(opened, act, adapter, chosen.policy, chosen.steps),
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
    from traced import acts
    from traced.commands.acting import decided

    if _is_prompt(adapter):
        done = decided(
            read_settings(data_dir, given),
            lambda client: client.prompts.reject(adapter, reason, who),
            lambda opened, act: acts.reject_prompt(opened, act, adapter),
            who=who,
            reason=reason,
        )
        _tell_of_prompt(as_json, done, "traced prompts")
        return
    done = decided(
        read_settings(data_dir, given),
        lambda client: client.reject(adapter, reason, who),
        lambda opened, act: acts.reject(opened, act, adapter),
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
    from traced import acts
    from traced.commands.acting import decided

    done = decided(
        read_settings(data_dir, given),
        lambda client: client.roll_back(adapter, reason, who),
        lambda opened, act: acts.roll_back(opened, act, adapter),
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
    from traced import acts
    from traced.commands.acting import decided

    done = decided(
        read_settings(data_dir, given),
        lambda client: client.release(parked, reason, who),
        lambda opened, act: acts.release(opened, act, parked),
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
    from store.plain import line

    console.print(f"{line(done.said)}. {more}", highlight=False, markup=False)
