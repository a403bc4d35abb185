"""Helpers for the approvals screen: an adapter that is pending and can go live."""

from pathlib import Path

from sqlalchemy import update

from store.database import write_session
from store.tables import AdapterRow
from tests.integration.tui.conftest import RunningApp
from tests.integration.tui.screens import text_of, wait_until
from traced.api.control import Control
from traced.registry.publication import publish
from tui.app import SCREENS

KEY = str(list(SCREENS).index("approvals") + 1)


def publishable(folder: Path, control: Control) -> Control:
    """Store files for the pending adapter, so that its approval puts it live."""
    source = folder / "trained"
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).write_text(name)
    published = publish(source, folder / "adapters", "policy-checks", origin="run-policy-checks-1")
    with write_session(control.store) as session:
        row = update(AdapterRow).where(AdapterRow.name == published.name)  # type: ignore[arg-type]
        session.execute(row.values(path=str(published.path), files=published.files))
    return control


async def open_approvals(tui: RunningApp) -> None:
    """Open the approvals screen and wait for its first case."""
    await tui.pilot.press(KEY)
    # The overview contains the same text, so the mode is checked too.
    await wait_until(tui.pilot, lambda: tui.app.current_mode == "approvals" and "decision pending" in text_of(tui.app))


def screen_text(tui: RunningApp) -> str:
    return text_of(tui.app)
