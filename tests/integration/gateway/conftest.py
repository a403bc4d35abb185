"""The router waits for the store as long as a busy machine needs; tests of a store that hangs set their own limits."""

import pytest

from traced.gateway import conversation_writer, conversations, quotas, stored_responses

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LOOKUP_S", PATIENCE_S)
    for module in (conversation_writer, quotas, stored_responses):
        monkeypatch.setattr(module, "LIMIT_S", PATIENCE_S)
