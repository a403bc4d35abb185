"""The command audit: the audit log of decisions, the head of its hash chain, and a check of the chain."""

from collections.abc import Sequence
from typing import Annotated

import typer
from sqlmodel import Session

from store.audit_chain import AuditHead, parse_head
from store.records import AuditEntry
from store.repositories.events import audit_head, check_audit, is_in_audit, list_audit
from store.text import sanitize_line, signature
from traced.cli.options import AsJson, DataDir, Overrides, read_settings
from traced.cli.output import console, print_json
from traced.cli.store_session import store_reader
from traced.core.errors import TracedError

EarlierHead = Annotated[
    str,
    typer.Argument(
        metavar="[HEAD]", help="With --check: an earlier head, which the log has to contain.", show_default=False
    ),
]
Head = Annotated[bool, typer.Option("--head", help="Print the number and the hash of the newest entry.")]
Check = Annotated[bool, typer.Option("--check", help="Check that every entry follows from the one before.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Number of entries to list, newest first.")]


def audit(
    earlier_head: EarlierHead = "",
    *,
    head: Head = False,
    check: Check = False,
    limit: Limit = 50,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """List the audit log; print its head, to keep it elsewhere; or check that nobody has changed the log.

    A check notices entries that were changed, removed or inserted. With a head that was kept elsewhere it also notices
    that the newest entries were removed, or that the whole log was written again.
    """
    if earlier_head and not check:
        raise typer.BadParameter("can only be used with --check", param_hint="HEAD")
    expected_head = _parse(earlier_head)
    with store_reader(read_settings(data_dir, overrides)) as session:
        if check:
            _check(session, expected_head)
        current_head = str(audit_head(session))
        entries = [] if head or check else list_audit(session, limit=limit)
    if as_json:
        print_json({"head": current_head, "sound": True} if check else {"head": current_head, "entries": entries})
    elif check:
        console.print(f"Every entry follows from the one before. Head: {current_head}", highlight=False)
    elif head:
        console.print(current_head, highlight=False)
    else:
        _print(entries)


def _parse(text: str) -> AuditHead:
    try:
        return parse_head(text) if text else AuditHead()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="HEAD") from None


def _check(session: Session, expected_head: AuditHead) -> None:
    """Raise ``TracedError`` unless the log is a chain that contains the head."""
    wrong = check_audit(session)
    if wrong is not None:
        raise TracedError(
            f"the audit log was changed: entry {wrong} does not follow from the entries before it",
            hint="compare it with a backup or with the log of the service",
        )
    if not is_in_audit(session, expected_head):
        raise TracedError(
            f"the audit log was cut or written again: it does not contain the entry {expected_head}",
            hint="compare it with a backup or with the log of the service; a restore also removes newer entries",
        )


def _print(entries: Sequence[AuditEntry]) -> None:
    for entry in entries:
        person = sanitize_line(signature(entry.who, str(entry.detail.get("on_behalf_of", ""))))
        action = f"{sanitize_line(entry.action)} {sanitize_line(entry.subject)}"
        reason = f", because {sanitize_line(entry.reason)}" if entry.reason else ""
        line = f"{entry.seq} {entry.at:%Y-%m-%d %H:%M} UTC {person} ({sanitize_line(entry.role)}): {action}{reason}"
        console.print(line, highlight=False, markup=False)
    if not entries:
        console.print("The audit log is empty.")
