"""traced outcomes: a rule file is checked and applied, a judge is measured before it counts, people overrule both."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from store.database import open_store, sqlite_url, write_session
from store.records import Feedback
from store.repositories.trajectories import save_trajectories
from tests.acceptance.conftest import Traced
from tests.integration.scoring.reading_judge import by_words
from tests.scripted_model import scripted_server
from tests.unit.scoring.conversations import call, conversation, text_message
from tests.unit.store.chain import T0
from traced.scoring.evidence import Labels, label_trajectory

RECORDINGS = Path(__file__).parent.parent / "data" / "tau-bench"
RULES = """
[[rule]]
name = "refused at last"
outcome = "failure"
because = "the tool said no"
when = {call = {tool = "cancel_order", which = "last", result = {matches = "^Error"}}}

[[rule]]
name = "cancelled"
outcome = "success"
when = {call = {tool = "cancel_order", result = {path = "$.status", eq = "cancelled"}}}
"""


@pytest.fixture
def production(tmp_path: Path) -> Path:
    """A data directory with unscored conversations: two for the rules and forty for the judge."""
    store = open_store(sqlite_url(tmp_path / "traced-data" / "traced.db"))
    with write_session(store) as session:
        trajectories = [
            conversation(*call("cancel_order", {"id": 7}, result), trajectory_id=name, source="desk")
            for name, result in (("good", {"status": "cancelled"}), ("bad", "Error: too late"))
        ]
        trajectories += [
            conversation(text_message("assistant", text), trajectory_id=f"{text[:4]}-{number:02}", source="desk")
            for number in range(20)
            for text in ("done", "sorry, no")
        ]
        save_trajectories(session, trajectories)
    store.dispose()
    (tmp_path / "rules.toml").write_text(RULES)
    return tmp_path / "traced-data"


def outcomes(data_dir: Path) -> dict[str, str]:
    with sqlite3.connect(data_dir / "traced.db") as database:
        return dict(database.execute("select id, outcome from trajectories"))


def test_a_rule_file_beside_real_recordings_is_checked_and_changes_nothing(traced: Traced, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = json.loads((RECORDINGS / "three-records.json").read_text())
    (tmp_path / "recorded.json").write_text(json.dumps(records))
    assert traced("import", "recorded.json").code == 0
    outcomes_before = outcomes(tmp_path / "traced-data")
    result = traced("outcomes", "check", RECORDINGS / "rules.toml", "--json")
    assert result.code == 0, result.err
    check = result.json["checked"]
    assert (check["source"], check["trajectories"]) == ("tau-bench", 3)
    assert len(result.json["rules"]) == len(check["rules"]) == 4
    assert check["undecided"] + sum(rule["decides"] for rule in check["rules"]) == 3
    for rule in check["rules"]:
        assert sum(rule["agrees"].values()) + sum(rule["disagrees"].values()) == rule["decides"]
        assert len(rule["against"]) == sum(rule["disagrees"].values())
    applied = traced("outcomes", "apply", "--again", "--set", f"outcomes.rules={RECORDINGS / 'rules.toml'}", "--json")
    assert applied.json["rules"]["judged"] == {}  # the recordings came with their outcomes
    assert outcomes(tmp_path / "traced-data") == outcomes_before
    report = traced("outcomes", "show", next(iter(outcomes_before)), "--json").json
    assert (report["by"], report["said"]) == ("source", [])


def test_mistakes_are_told_by_their_lines(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES.replace("which", "wich").replace('"success"', '"good"'))
    result = traced("outcomes", "check", "rules.toml", "--json")
    assert result.code == 2
    assert "rules.toml, line 6, rule 1 'refused at last': when.call.wich" in result.json["error"]["message"]
    assert "rules.toml, line 10, rule 2 'cancelled': outcome" in result.json["error"]["message"]
    assert "allowed are tool, arguments, result, which" in result.json["error"]["message"]
    serve_result = traced("serve", "--set", "outcomes.rules=rules.toml", "--json")
    assert (serve_result.code, serve_result.json["error"]["type"]) == (2, "RuleFileError")
    (tmp_path / "rules.toml").write_text(RULES)
    assert "no trajectories are stored yet" in traced("outcomes", "check", "rules.toml").out
    assert not (tmp_path / "traced-data").exists()


def test_rules_decide_what_nobody_did_and_a_person_overrules_them(traced: Traced, production: Path) -> None:
    assert traced("outcomes", "apply").code == 2
    ruled = ("outcomes", "apply", "--set", "outcomes.rules=rules.toml", "--json")
    first = traced(*ruled)
    assert first.code == 0, first.err
    assert (first.json["rules"]["judged"], first.json["rules"]["unknown"]) == ({"success": 1, "failure": 1}, 40)
    assert traced(*ruled).json["rules"]["judged"] == {}
    assert (outcomes(production)["good"], outcomes(production)["bad"]) == ("success", "failure")
    result = traced("outcomes", "show", "bad")
    assert "by rules (rules:" in result.out
    assert "refused at last: the tool said no" in result.out
    assert traced("outcomes", "label", "bad", "success", "--who", "rules:me").code == 2
    assert traced("outcomes", "label", "bad", "success", "--who", "Ada", "--reason", "it was free").code == 0
    assert traced(*ruled, "--again").json["rules"]["judged"] == {}
    report = traced("outcomes", "show", "bad", "--json").json
    assert (report["outcome"], report["by"], report["who"]) == ("success", "people", "Ada")
    assert [label["who"].partition(":")[0] for label in report["said"]] == ["rules", "Ada"]
    check = traced("outcomes", "check", "rules.toml", "--json").json["checked"]
    assert check["rules"][0]["disagrees"] == {"people": 1}
    assert check["rules"][0]["against"] == ["bad"]
    assert traced("outcomes", "show", "nobody").code == 1


def test_a_judge_counts_only_after_it_agreed_with_people(traced: Traced, production: Path) -> None:
    with scripted_server(by_words) as server:
        settings = ["model=m", f"base_url={server.url}", "min_labels=4"]
        judge = [word for setting in settings for word in ("--set", f"outcomes.judge.{setting}")]
        refusal = traced("outcomes", "apply", "--judge", *judge, "--json")
        assert (refusal.code, refusal.json["error"]["type"]) == (1, "JudgeNotTrusted")
        assert refusal.json["error"]["hint"] == "traced outcomes agreement"
        assert server.requests == []
        people_label(production, {"done-00": 1.0, "done-01": 1.0, "sorr-00": 0.0, "sorr-01": 0.0})
        agreement = traced("outcomes", "agreement", *judge)
        assert agreement.code == 0, agreement.err
        assert "kappa        1.00 [1.00, 1.00] at 95 %" in agreement.out
        assert "The judge can be used. Next: traced outcomes apply --judge" in agreement.out
        applied = traced("outcomes", "apply", "--judge", *judge, "--json")
        assert applied.code == 0, applied.err
        assert (applied.json["rules"], applied.json["judge"]["unknown"]) == (None, 2)
        assert applied.json["judge"]["judged"] == {"success": 18, "failure": 18}
    labels = outcomes(production)
    assert {labels[name] for name in labels if name.startswith("done")} == {"success"}
    assert {labels[name] for name in labels if name.startswith("sorr")} == {"failure"}
    assert (labels["good"], labels["bad"]) == ("unknown", "unknown")  # it could not tell


def people_label(data_dir: Path, scores: dict[str, float]) -> None:
    """Save scores of people, as the router does."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(store) as session:
        for name, score in scores.items():
            label_trajectory(session, Feedback(name, T0, "", score, who="Ada"), Labels([], []))
    store.dispose()


def test_a_source_that_is_not_there_is_told_with_those_that_are(traced: Traced, production: Path) -> None:
    result = traced("outcomes", "check", "rules.toml", "--source", "elsewhere", "--json")
    assert result.code == 1
    assert "'elsewhere'; the stored sources are: desk" in result.json["error"]["message"]


def test_rules_judge_what_an_import_brings_without_an_outcome(traced: Traced, tmp_path: Path) -> None:
    rules, file = tmp_path / "rules.toml", tmp_path / "said.jsonl"
    rules.write_text('[[rule]]\nname = "done"\noutcome = "success"\nwhen = {answer = {matches = "done"}}\n')
    lines = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]} for text in "ab"]
    for line, answer in zip(lines, ("It is done.", "No."), strict=True):
        line["messages"].append({"role": "assistant", "content": answer})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = traced("import", str(file), "--set", f'outcomes.rules="{rules}"', "--json")
    assert result.code == 0, result.err
    assert (result.json["outcomes"], result.json["judged"]) == ({"unknown": 2}, 1)
    rules.write_text("[[rule]]\n")
    refusal = traced("import", str(file), "--set", f'outcomes.rules="{rules}"')
    assert (refusal.code, "rules.toml" in refusal.err) == (2, True)
