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

RECORDED = Path(__file__).parent.parent / "data" / "tau-bench"
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
    """A data directory with conversations that nobody scored: two that rules decide, and forty for a judge."""
    store = open_store(sqlite_url(tmp_path / "traced-data" / "traced.db"))
    with write_session(store) as opened:
        made = [
            conversation(*call("cancel_order", {"id": 7}, result), trajectory_id=name, source="desk")
            for name, result in (("good", {"status": "cancelled"}), ("bad", "Error: too late"))
        ]
        made += [
            conversation(text_message("assistant", text), trajectory_id=f"{text[:4]}-{number:02}", source="desk")
            for number in range(20)
            for text in ("done", "sorry, no")
        ]
        save_trajectories(opened, made)
    store.dispose()
    (tmp_path / "rules.toml").write_text(RULES)
    return tmp_path / "traced-data"


def outcomes(data_dir: Path) -> dict[str, str]:
    with sqlite3.connect(data_dir / "traced.db") as database:
        return dict(database.execute("select id, outcome from trajectories"))


def test_a_rule_file_beside_real_recordings_is_checked_and_changes_nothing(traced: Traced, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = json.loads((RECORDED / "three-records.json").read_text())
    (tmp_path / "recorded.json").write_text(json.dumps(records))
    assert traced("import", "recorded.json").code == 0
    before = outcomes(tmp_path / "traced-data")
    ran = traced("outcomes", "check", RECORDED / "rules.toml", "--json")
    assert ran.code == 0, ran.err
    checked = ran.json["checked"]
    assert (checked["source"], checked["trajectories"]) == ("tau-bench", 3)
    assert len(ran.json["rules"]) == len(checked["rules"]) == 4
    assert checked["undecided"] + sum(one["decides"] for one in checked["rules"]) == 3
    for one in checked["rules"]:
        assert sum(one["agrees"].values()) + sum(one["disagrees"].values()) == one["decides"]
        assert len(one["against"]) == sum(one["disagrees"].values())
    applied = traced("outcomes", "apply", "--again", "--set", f"outcomes.rules={RECORDED / 'rules.toml'}", "--json")
    assert applied.json["rules"]["judged"] == {}  # the recordings came with their outcomes
    assert outcomes(tmp_path / "traced-data") == before
    shown = traced("outcomes", "show", next(iter(before)), "--json").json
    assert (shown["by"], shown["said"]) == ("source", [])


def test_mistakes_are_told_by_their_lines(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES.replace("which", "wich").replace('"success"', '"good"'))
    ran = traced("outcomes", "check", "rules.toml", "--json")
    assert ran.code == 2
    assert "rules.toml, line 6, rule 1 'refused at last': when.call.wich" in ran.json["error"]["message"]
    assert "rules.toml, line 10, rule 2 'cancelled': outcome" in ran.json["error"]["message"]
    assert "allowed are tool, arguments, result, which" in ran.json["error"]["message"]
    served = traced("serve", "--set", "outcomes.rules=rules.toml", "--json")
    assert (served.code, served.json["error"]["type"]) == (2, "RuleFileError")
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
    shown = traced("outcomes", "show", "bad")
    assert "by rules (rules:" in shown.out
    assert "refused at last: the tool said no" in shown.out
    assert traced("outcomes", "label", "bad", "success", "--who", "rules:me").code == 2
    assert traced("outcomes", "label", "bad", "success", "--who", "Ada", "--reason", "it was free").code == 0
    assert traced(*ruled, "--again").json["rules"]["judged"] == {}
    told = traced("outcomes", "show", "bad", "--json").json
    assert (told["outcome"], told["by"], told["who"]) == ("success", "people", "Ada")
    assert [one["who"].partition(":")[0] for one in told["said"]] == ["rules", "Ada"]
    checked = traced("outcomes", "check", "rules.toml", "--json").json["checked"]
    assert checked["rules"][0]["disagrees"] == {"people": 1}
    assert checked["rules"][0]["against"] == ["bad"]
    assert traced("outcomes", "show", "nobody").code == 1


def test_a_judge_counts_only_after_it_agreed_with_people(traced: Traced, production: Path) -> None:
    with scripted_server(by_words) as server:
        chosen = ["model=m", f"base_url={server.url}", "min_labels=4"]
        judge = [word for one in chosen for word in ("--set", f"outcomes.judge.{one}")]
        refused = traced("outcomes", "apply", "--judge", *judge, "--json")
        assert (refused.code, refused.json["error"]["type"]) == (1, "JudgeNotTrusted")
        assert refused.json["error"]["hint"] == "traced outcomes agreement"
        assert server.requests == []
        people_label(production, {"done-00": 1.0, "done-01": 1.0, "sorr-00": 0.0, "sorr-01": 0.0})
        enough = traced("outcomes", "agreement", *judge)
        assert enough.code == 0, enough.err
        assert "kappa        1.00 [1.00, 1.00] at 95 %" in enough.out
        assert "The judge can be used. Next: traced outcomes apply --judge" in enough.out
        applied = traced("outcomes", "apply", "--judge", *judge, "--json")
        assert applied.code == 0, applied.err
        assert (applied.json["rules"], applied.json["judge"]["unknown"]) == (None, 2)
        assert applied.json["judge"]["judged"] == {"success": 18, "failure": 18}
    found = outcomes(production)
    assert {found[name] for name in found if name.startswith("done")} == {"success"}
    assert {found[name] for name in found if name.startswith("sorr")} == {"failure"}
    assert (found["good"], found["bad"]) == ("unknown", "unknown")  # it could not tell


def people_label(data_dir: Path, scores: dict[str, float]) -> None:
    """What people said through the router."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(store) as opened:
        for name, score in scores.items():
            label_trajectory(opened, Feedback(name, T0, "", score, who="Ada"), Labels([], []))
    store.dispose()


def test_a_source_that_is_not_there_is_told_with_those_that_are(traced: Traced, production: Path) -> None:
    ran = traced("outcomes", "check", "rules.toml", "--source", "elsewhere", "--json")
    assert ran.code == 1
    assert "'elsewhere'; the stored sources are: desk" in ran.json["error"]["message"]


def test_rules_judge_what_an_import_brings_without_an_outcome(traced: Traced, tmp_path: Path) -> None:
    rules, file = tmp_path / "rules.toml", tmp_path / "said.jsonl"
    rules.write_text('[[rule]]\nname = "done"\noutcome = "success"\nwhen = {answer = {matches = "done"}}\n')
    lines = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]} for text in "ab"]
    for line, answer in zip(lines, ("It is done.", "No."), strict=True):
        line["messages"].append({"role": "assistant", "content": answer})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = traced("import", str(file), "--set", f'outcomes.rules="{rules}"', "--json")
    assert told.code == 0, told.err
    assert (told.json["outcomes"], told.json["judged"]) == ({"unknown": 2}, 1)
    rules.write_text("[[rule]]\n")
    refused = traced("import", str(file), "--set", f'outcomes.rules="{rules}"')
    assert (refused.code, "rules.toml" in refused.err) == (2, True)
