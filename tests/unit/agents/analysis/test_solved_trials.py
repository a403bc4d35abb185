"""Changes compared with solved trials of the same task, in two domains whose tools and languages share no word."""

from dataclasses import dataclass, replace

import pytest

from agents.analyst.builtin import CANDIDATES, label_runs
from agents.analyst.solved_trials import Trial, nearest_deviations
from agents.transcript import Call
from store.types import Outcome, Tool, Trajectory, Verdict
from tests.unit.agents.analysis.library import agent, calls, declared, talk, user

EXACTNESS, COMPLETENESS, RESTRAINT = "change-exactness", "change-completeness", "change-restraint"
TEXT = {"type": "string"}


@dataclass(frozen=True)
class Domain:
    """The words of a domain: its tools with their arguments, and what user and agent say."""

    query: str
    move: str
    close: str
    key: str
    place: str
    asks: str
    ends: str

    @property
    def tools(self) -> list[Tool]:
        key, place = {self.key: TEXT}, {self.place: TEXT}
        parameters = {self.query: key, self.move: key | place, self.close: key}
        return [declared(name, "", **properties) for name, properties in parameters.items()]


ENGLISH = Domain("get_parcel", "update_parcel", "cancel_parcel", "parcel", "depot", "Please move {0}.", "Done.")
FINNISH = Domain("hae_tili", "muuta_tili", "sulje_tili", "tilinumero", "konttori", "Siirtäkää tili {0}.", "Valmis.")
DOMAINS = [pytest.param(ENGLISH, id="english"), pytest.param(FINNISH, id="finnish")]


def trial(domain: Domain, task: int, name: str, *changes: tuple[str, ...], success: bool = True) -> Trajectory:
    """A conversation that reads its object and makes the changes: ("move", place), ("close",) or ("close", object)."""
    key = f"P{100 + task}"
    parts = [user(domain.asks.format(key))]
    parts += calls(domain.query, {domain.key: key, domain.place: "A1", "kg": 7, "cm": 30}, **{domain.key: key})
    for kind, *values in changes:
        if kind == "move":
            parts += calls(domain.move, {"ok": True}, **{domain.key: key, domain.place: values[0]})
        else:
            parts += calls(domain.close, {"ok": True}, **{domain.key: values[0] if values else key})
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    trajectory = talk(*parts, agent(domain.ends), name=f"{task}-{name}", outcome=outcome)
    return replace(trajectory, task_id=str(task), tools=domain.tools)


def findings(trajectories: list[Trajectory]) -> dict[tuple[str, str], tuple[Verdict, int | None]]:
    """The verdict and message of each (trajectory, capability) that compares with solved trials."""
    capabilities = [item for item in CANDIDATES if item.name in (EXACTNESS, COMPLETENESS, RESTRAINT)]
    labels = label_runs(trajectories, capabilities, runs=[0], seed=0)
    return {(item.trajectory_id, item.capability): (item.verdict, item.message_index) for item in labels}


def trials(domain: Domain, *additions: Trajectory, tasks: int = 6) -> list[Trajectory]:
    """Tasks with two solved trials that move their object, and a failure that closes another one."""
    rows = [trial(domain, task, name, ("move", "B2")) for task in range(tasks) for name in ("a", "b")]
    rows += [trial(domain, task, "f", ("move", "B2"), ("close", "P999"), success=False) for task in range(tasks)]
    return [*rows, *additions]


@pytest.mark.parametrize("domain", DOMAINS)
def test_deviations_from_a_solved_trial_are_cited_at_their_step(domain: Domain) -> None:
    changed = trial(domain, 0, "changed", ("move", "C3"), success=False)
    missing = trial(domain, 1, "missing", success=False)
    rows = findings(trials(domain, changed, missing))
    assert rows["0-changed", EXACTNESS] == (Verdict.LACKING, 4)
    assert rows["0-changed", COMPLETENESS][0] is rows["0-changed", RESTRAINT][0] is Verdict.PRESENT
    assert rows["1-missing", COMPLETENESS] == (Verdict.LACKING, 4)
    assert rows["1-missing", EXACTNESS][0] is Verdict.NA
    assert rows["2-f", RESTRAINT] == (Verdict.LACKING, 6)
    assert rows["2-f", EXACTNESS][0] is rows["2-a", EXACTNESS][0] is Verdict.PRESENT
    assert {rows[f"{task}-{name}", RESTRAINT][0] for task in range(6) for name in "ab"} == {Verdict.PRESENT}


def test_a_success_is_compared_with_the_other_successes_and_its_outcome_does_not_count() -> None:
    """Two solved trials of task 0 differ; the third agrees with the first."""
    odd = trial(ENGLISH, 0, "odd", ("move", "B2"), ("close",))
    rows = findings(trials(ENGLISH, odd))
    assert rows["0-odd", RESTRAINT] == (Verdict.LACKING, 6)
    failed = replace(odd, outcome=Outcome.FAILURE)
    assert findings(trials(ENGLISH, failed))["0-odd", RESTRAINT] == (Verdict.LACKING, 6)


def test_the_only_solution_of_a_task_has_nothing_to_compare_with() -> None:
    solution = trial(ENGLISH, 9, "only", ("move", "B2"))
    rows = findings(trials(ENGLISH, solution, trial(ENGLISH, 9, "none", success=False)))
    assert {rows["9-only", name][0] for name in (EXACTNESS, COMPLETENESS, RESTRAINT)} == {Verdict.NA}
    assert rows["9-none", COMPLETENESS][0] is Verdict.LACKING


def test_in_a_task_that_nobody_solved_doing_nothing_is_incomplete_if_the_others_did_something() -> None:
    peers = [trial(ENGLISH, 9, name, ("move", "C3"), success=False) for name in "xy"]
    idle = trial(ENGLISH, 9, "idle", success=False)
    rows = findings(trials(ENGLISH, *peers, idle))
    assert rows["9-idle", COMPLETENESS] == (Verdict.LACKING, 4)
    assert rows["9-x", EXACTNESS][0] is rows["9-x", RESTRAINT][0] is Verdict.NA
    assert findings(trials(ENGLISH, peers[0], idle))["9-idle", COMPLETENESS][0] is Verdict.NA


def test_without_enough_tasks_with_both_outcomes_nothing_is_compared() -> None:
    rows = findings(trials(ENGLISH, tasks=4))
    assert {verdict for verdict, _ in rows.values()} == {Verdict.NA}


def test_the_nearest_solved_trial_counts_and_equal_calls_are_paired_first() -> None:
    def call(index: int, name: str, **arguments: object) -> Call:
        return Call(index, name, arguments, "", None)

    changes = [call(3, "move", key="P1", place="B"), call(5, "move", key="P2", place="C")]
    near = Trial("near", [call(1, "move", key="P2", place="C"), call(2, "move", key="P1", place="A")], True)
    far = Trial("far", [call(1, "close", key="P1")], True)
    result = nearest_deviations("t", changes, [far, near, Trial("t", changes, True), Trial("u", changes, False)])
    assert result is not None
    assert (result.shared, result.changed, result.missing, result.extra) == ([changes[1]], [changes[0]], [], [])
    assert nearest_deviations("near", changes, [near]) is None
