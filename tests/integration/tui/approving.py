"""The approvals screen with an adapter that waits and can go live."""

from pathlib import Path

from sqlalchemy import update

from store.database import write_session
from store.tables import AdapterRow
from tests.integration.tui.conftest import Running
from tests.integration.tui.screens import text_of, until
from traced.api.control import Control
from traced.registry.publication import publish
from tui.app import SCREENS

KEY = str(list(SCREENS).index("approvals") + 1)


def publishable(folder: Path, control: Control) -> Control:
    """The same, with files behind the adapter that waits: approving it puts it live."""
    source = folder / "trained"
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).write_text(name)
    published = publish(source, folder / "adapters", "policy-checks", origin="run-policy-checks-1")
    with write_session(control.store) as opened:
        row = update(AdapterRow).where(AdapterRow.name == published.name)  # type: ignore[arg-type]
        opened.execute(row.values(path=str(published.path)))
    return control


async def there(on: Running) -> None:
    """Go to the screen and wait for its first case."""
    await on.pilot.press(KEY)
    # The overview shows the same words.
    await until(on.pilot, lambda: on.app.current_mode == "approvals" and "decision pending" in text_of(on.app))


def shown(on: Running) -> str:
    return text_of(on.app)
