import re
from pathlib import Path

import pytest

from store.database import open_store, sqlite_url, write_session
from store.types import GateAnswer
from tests.acceptance.conftest import Traced
from tests.unit.registry.chain import seed_adapter, seed_cycle
from traced.core.ownership import this_user


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with one adapter whose gate passed and one whose gate was inconclusive."""
    directory = tmp_path / "traced-data"
    engine = open_store(sqlite_url(directory / "traced.db"))
    with write_session(engine) as session:
        seed_cycle(session)
        seed_adapter(session, directory, 1)
        seed_adapter(session, directory, 2, GateAnswer.INCONCLUSIVE)
    engine.dispose()
    return directory


def test_approve_then_rollback(traced: Traced, data_dir: Path) -> None:
    assert traced("status", "--json").json["waiting"] == ["error-recovery@v1"]
    approved = traced("approve", "error-recovery@v1", "--yes", "--who", "ann", "--reason", "good", "--json")
    assert approved.code == 0, approved.err
    assert approved.json["decision"]["who"] == f"{this_user()}, on behalf of ann"
    assert approved.json["live"] == ["error-recovery@v1"]
    assert traced("status", "--json").json["live"] == ["error-recovery@v1"]
    undone = traced("rollback", "--yes", "--json")
    assert undone.json["rolled_back"] == "error-recovery@v1"
    assert (undone.json["restored"], undone.json["live"]) == (None, [])
    assert traced("status", "--json").json["adapters"][0]["traffic"] == "rolled back"
    repeated = traced("rollback", "--yes")
    assert repeated.code == 0
    assert "error-recovery@v1 was rolled back before (by " in repeated.out


def test_a_decision_is_shown_and_asked_about(traced: Traced, data_dir: Path) -> None:
    declined = traced("approve", "error-recovery@v1", stdin="n\n")
    assert declined.code == 1
    assert "the decision was not confirmed" in declined.err
    for line in ("gate: pass on ", "target: 20.0 -> 50.0 %", "effect: error-recovery@v1 goes live"):
        assert line in declined.out
    unattended = traced("approve", "error-recovery@v1")
    assert (unattended.code, "Try: --yes decides without a question" in unattended.err) == (1, True)
    assert traced("status", "--json").json["waiting"] == ["error-recovery@v1"]
    assert traced("approve", "error-recovery@v1", stdin="y\n").code == 0
    undone = traced("rollback", stdin="y\n")
    assert "effect: error-recovery@v1 takes no more traffic; the base model answers the conversations" in undone.out
    # Whoever confirms has read that it was rolled back.
    second = traced("approve", "error-recovery@v1", stdin="y\n")
    assert (second.code, "before: error-recovery@v1 is rolled back (by " in second.out) == (0, True)


def test_inconclusive_cannot_be_approved_and_nothing_is_written(traced: Traced, data_dir: Path) -> None:
    result = traced("approve", "error-recovery@v2", "--yes")
    assert result.code == 1
    assert "error-recovery@v2 cannot be approved: its gate answered inconclusive" in result.err
    assert "Try: traced explain error-recovery@v2" in result.err
    rejected = traced("reject", "error-recovery@v2", "--reason", "not shown", "--json")
    assert rejected.json["decision"]["decision"] == "rejected"


def test_status_and_explain_show_the_chain(traced: Traced, data_dir: Path) -> None:
    traced("approve", "error-recovery@v1", "--yes", "--who", "ann", "--reason", "good")
    status = traced("status")
    assert "error-recovery@v1" in status.out
    assert "live" in status.out
    explanation = traced("explain", "error-recovery@v1")
    assert explanation.code == 0, explanation.err
    for piece in (
        "lacking in   1 trajectories, for example:",
        "t1, message 1",
        "outcomes     1 came with the trajectory",
        "10 runs: 10 lacking",
        "gap +0.50, coverage 0.40, 10 of 10 runs agree: retained",
        "admitted, 1 of 1 checks passed",
        "run-1: finished, seed 0",
        "target: base 20.0 %, adapter 50.0 %, +30.0 points [+20.0, +40.0]",
        f"approved by {this_user()}, on behalf of ann",
        "because good",
        f"live by {this_user()}, on behalf of ann",
    ):
        assert piece in explanation.out
    chain = traced("explain", "error-recovery@v1", "--json").json
    assert chain["environment"]["source_code"] == "class Environment: ..."
    assert chain["missing"] == []


def test_an_unknown_adapter_and_an_empty_directory_are_clear_messages(
    traced: Traced, data_dir: Path, tmp_path: Path
) -> None:
    unknown = traced("explain", "nothing@v1", "--json")
    assert unknown.code == 1
    assert unknown.json["error"]["type"] == "NotFound"
    for words in (["status"], ["approve", "nothing@v1"], ["rollback"]):
        empty = traced(*words, "--data-dir", tmp_path / "empty")
        assert empty.code == 1
        assert "has no store yet" in empty.err
        assert not (tmp_path / "empty").exists()


def test_a_file_that_is_no_database_is_one_clear_message(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "traced-data").mkdir()
    (tmp_path / "traced-data" / "traced.db").write_text("this is no database" * 100)
    result = traced("status")
    assert result.code == 1
    assert "traced.db failed: file is not a database" in result.err
    assert "Traceback" not in result.err


def test_a_canary_begins_goes_live_at_a_word_and_ends_with_a_rollback(traced: Traced, data_dir: Path) -> None:
    approval = traced("approve", "error-recovery@v1", "--yes", "--policy", "canary")
    assert "error-recovery@v1 is approved and has 5 % of its conversations as a canary" in approval.out
    assert "Live: the base model only" in approval.out
    assert traced("status", "--json").json["adapters"][0]["traffic"] == "canary 5 %"
    explanation = traced("explain", "error-recovery@v1").out
    assert "promotion    canary 5 % " in explanation
    assert "canary       0 of 30 judged at 5 %" in explanation
    repeated = traced("approve", "error-recovery@v1", "--yes", "--policy", "canary", "--json").json
    assert (repeated["promotion"]["state"], repeated["promotion"]["share"]) == ("canary", 0.05)
    refusal = traced("reject", "error-recovery@v1")
    assert (refusal.code, "error-recovery@v1 is on trial (canary)" in refusal.err) == (1, True)
    assert "Try: traced rollback error-recovery@v1" in refusal.err
    full = traced("approve", "error-recovery@v1", "--yes", "--policy", "immediate", "--json").json
    assert full["live"] == ["error-recovery@v1"]
    traced("rollback", "--yes")
    second = traced("approve", "error-recovery@v1", "--yes", "--set", "promotion.policy=shadow")
    tag = re.findall("--tag ([0-9a-f]{16})", second.err)
    assert "was decided on before: error-recovery@v1 is rolled back (by " in " ".join(second.err.split())
    shadow = traced("approve", "error-recovery@v1", "--yes", "--set", "promotion.policy=shadow", "--tag", *tag)
    assert "answers as a shadow" in shadow.out
    assert traced("rollback", "--yes", "--json").json["rolled_back"] == "error-recovery@v1"
    wrong = traced("approve", "error-recovery@v1", "--yes", "--policy", "sometimes")
    assert wrong.code == 2
    assert "promotion.policy" in wrong.err
