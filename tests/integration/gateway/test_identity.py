"""``benchmarks.identity`` on few users: real clients, a real router, a restart, and figures on every part."""

import json

import pytest

from benchmarks.identity.__main__ import SHORT_USERS, main

pytestmark = pytest.mark.slow


def test_named_conversations_stay_whole_and_keys_apart(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--short", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["users"] == SHORT_USERS
    assert figures["aims"]["all_exchanges_stored"]
    assert figures["aims"]["with_ids_splits_0"]
    assert figures["aims"]["with_ids_wrong_joins_0"]
    assert figures["aims"]["feedback_wrong_0"]
    assert figures["aims"]["without_ids_joins_across_keys_0"]
    halves = [figures["with_ids"]["all"], figures["without_ids"]["all"]]
    assert not any(half["joins_across_keys"] for half in halves)
    assert min(half["follow_ups"] for half in halves) > 100
    assert figures["feedback"]["other_key_tried"] > 10
    assert figures["feedback"]["other_key_accepted"] == 0
    assert figures["feedback"]["judged_trajectories"] > 30
    assert figures["canary"]["without_ids"]["on_trial"] > 10
