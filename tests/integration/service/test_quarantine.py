"""The service and an adapter whose files were replaced: its approval is refused, and the API shows the quarantine."""

from datetime import timedelta
from pathlib import Path

from store.database import read_session
from store.repositories.events import due_notices
from tests.integration.service.api_server import expect_refusal, serve_api
from tests.unit.registry.tampering import WEIGHTS, replace_weights
from traced.api.control import Control
from traced.config.settings import load_settings
from traced.registry.integrity import QUARANTINED
from tui.screens.serving_panels import model_cells, model_text

NAME = "date-reasoning@v1"


async def test_a_refused_approval_puts_the_version_in_quarantine(control: Control, path: Path, tmp_path: Path) -> None:
    control.settings = load_settings(tmp_path, {"notify.commands": [{"name": "tell", "argv": ["true"]}]})
    replace_weights(tmp_path / "adapters" / NAME)
    async with serve_api(control, path) as client:
        for _ in range(2):
            refusal = await expect_refusal(client.approve(NAME))
            assert (refusal.status, f"{NAME} is not what was published" in refusal.message) == (409, True)
            assert refusal.hint.endswith(f"traced verify --release {NAME}")
        (adapter,) = await client.adapters()
        model = next(model for model in (await client.serving.models()).models if model.name == NAME)
        assert [event.kind for event in control.events(0, 10)] == [QUARANTINED]
    assert adapter.quarantine.startswith(WEIGHTS)
    assert model.quarantine.startswith(WEIGHTS)
    assert model_cells(model)[1].plain == "! quarantined"
    assert "no traffic: adapter_model" in model_text(model, partial=False).plain
    with read_session(control.store) as session:
        notices = due_notices(session, ["tell"], at=control.now(), longest_wait=timedelta(days=1))
    assert [notice.body["kind"] for notice in notices] == ["adapter-quarantined"]
