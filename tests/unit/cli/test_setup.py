"""What ``traced doctor`` says of personal data in conversations."""

from pathlib import Path

import pytest

from traced.cli.setup import check_redaction
from traced.config.settings import load_settings

ACME = {"target.name": "acme", "target.kind": "recorded"}


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        ({}, False),
        (ACME, True),
        ({"serving.targets": ["acme"]}, True),
        (ACME | {"serving.redact": ["[0-9]{16}"]}, False),
        (ACME | {"serving.redact_fields": ["email"]}, False),
    ],
)
def test_conversations_without_redaction_are_named(
    tmp_path: Path, overrides: dict[str, object], is_warned: bool
) -> None:
    finding = check_redaction(load_settings(tmp_path, overrides))
    assert finding.ok
    assert bool(finding.warning) is is_warned
    if "serving.redact" in overrides:
        assert finding.seen.endswith("what was stored before these settings stays as it is")
