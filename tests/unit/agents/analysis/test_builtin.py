"""The builtin analyst as a whole: complete tables, determinism, and what it must never read."""

from dataclasses import replace

import pytest

from agents.analyst.builtin import discover, label, label_runs
from agents.analyst.corpus import mine
from agents.analyst.tools import ToolKind, classify
from agents.analyst.view import views
from agents.errors import AgentsError, TranscriptError
from agents.transcript import transcripts
from store.types import Outcome, Trajectory, Verdict
from tests.unit.agents.analysis.library import LOAN, agent, background, calls, renewal, talk, user

BACKGROUND = background()


def test_the_table_is_complete_and_infrastructure_is_na() -> None:
    malformed = talk(renewal("L900", with_lookup=False), name="broken", outcome=Outcome.INFRASTRUCTURE)
    trajectories = [*BACKGROUND, malformed]
    capabilities = discover(trajectories, seed=0)
    labels = label(trajectories, capabilities, run=3, seed=0)
    cells = [(trajectory.trajectory_id, trajectory.capability) for trajectory in labels]
    assert len(cells) == len(set(cells)) == len(trajectories) * len(capabilities)
    assert {trajectory.verdict for trajectory in labels if trajectory.trajectory_id == "broken"} == {Verdict.NA}
    assert {trajectory.run for trajectory in labels} == {3}
    assert all((trajectory.message_index is None) == (trajectory.verdict is Verdict.NA) for trajectory in labels)


def test_only_applicable_candidates_are_discovered() -> None:
    names = {trajectory.name for trajectory in discover(BACKGROUND, seed=0)}
    assert {"precondition-verification", "date-reasoning", "structured-data-reasoning"} <= names
    assert "error-recovery" not in names
    assert "multi-step-completion" not in names


def test_the_same_seed_gives_the_same_labels() -> None:
    capabilities = discover(BACKGROUND, seed=5)
    assert label(BACKGROUND, capabilities, run=1, seed=5) == label(BACKGROUND, capabilities, run=1, seed=5)
    assert label_runs(BACKGROUND, capabilities, runs=[0, 1], seed=5) == [
        *label(BACKGROUND, capabilities, run=0, seed=5),
        *label(BACKGROUND, capabilities, run=1, seed=5),
    ]


def test_privileged_fields_change_nothing() -> None:
    def canary(trajectory: Trajectory) -> Trajectory:
        return replace(
            trajectory, task_id="CANARY", parts={"CANARY": 1.0}, reward=0.123, detail="CANARY", split="CANARY"
        )

    capabilities = discover(BACKGROUND, seed=0)
    tainted = [canary(trajectory) for trajectory in BACKGROUND]
    assert discover(tainted, seed=0) == capabilities
    assert label(tainted, capabilities, run=0, seed=0) == label(BACKGROUND, capabilities, run=0, seed=0)
    assert "CANARY" not in repr(mine(views(tainted), [trajectory.outcome for trajectory in tainted]))


def test_tools_are_classified_with_and_without_schemas() -> None:
    outcomes = [trajectory.outcome for trajectory in BACKGROUND]
    for trajectories in (BACKGROUND, [replace(trajectory, tools=[]) for trajectory in BACKGROUND]):
        kinds = mine(views(trajectories), outcomes).kinds
        assert kinds["find_loan"] is kinds["search_catalogue"] is ToolKind.READ
        assert kinds["renew_loan"] is kinds["reserve_copy"] is ToolKind.WRITE
    assert mine(views(BACKGROUND), outcomes).kinds["escalate_to_librarian"] is ToolKind.HANDOFF


def _foreign_kinds(conversations: list[Trajectory], solutions: list[list[Trajectory]]) -> dict[str, ToolKind]:
    names = {call.name for row in transcripts(conversations) for call in row.calls}
    groups = [transcripts(group) for group in solutions]
    return classify({name: {} for name in sorted(names)}, transcripts(conversations), groups)


def _account(note: str, *, account: str = "T1", state: str = "auki") -> Trajectory:
    """An account is looked up, thought about and closed: the last answer is the account with another state."""
    record = {"tili": account, "tila": "auki", "saldo": 12}
    return talk(
        user("Sulkekaa tili."),
        calls("hae_tili", record, tili=account),
        calls("mieti", "ok", muistio=note),
        calls("laske", "12.5", lauseke=note),
        calls("sulje_tili", record | {"tila": state}, tili=account),
    )


def test_tools_with_foreign_names_are_classified_by_what_they_do() -> None:
    closed = [_account(f"muistio {number}", state="kiinni") for number in range(4)]
    kinds = _foreign_kinds(closed, [closed[:2], closed[2:]])
    assert kinds["hae_tili"] is ToolKind.READ
    assert kinds["sulje_tili"] is ToolKind.WRITE
    assert kinds["laske"] is kinds["mieti"] is ToolKind.PURE
    assert _foreign_kinds(closed, [])["mieti"] is ToolKind.WRITE
    unchanged = [_account("muistio") for _ in range(4)]
    assert _foreign_kinds(unchanged, [])["sulje_tili"] is ToolKind.READ


def test_conversations_that_share_no_call_are_no_trials_of_a_task() -> None:
    strangers = [_account(f"muistio {number}", account=f"T{number}", state="kiinni") for number in range(4)]
    assert _foreign_kinds(strangers, [strangers[:2], strangers[2:]])["sulje_tili"] is ToolKind.WRITE


def test_the_reading_before_a_renewal_is_mined() -> None:
    links = mine(views(BACKGROUND), [trajectory.outcome for trajectory in BACKGROUND]).links
    assert [(link.write_tool, link.write_parameter, link.read_tool) for link in links] == [
        ("renew_loan", "loan", "find_loan")
    ]


def test_the_reading_is_mined_from_refusals_where_no_renewal_shows_it() -> None:
    """An agent that looks only when it refuses: its unread renewals fail where somebody waits."""
    refusals = [_refusal(f"L{700 + n}", with_lookup=True) for n in range(6)]
    unread = [trajectory for trajectory in BACKGROUND if trajectory.id.startswith("unread")]
    for sample, expected in (([*refusals, *unread], ["find_loan"]), (unread, [])):
        links = mine(views(sample), [trajectory.outcome for trajectory in sample]).links
        assert [link.read_tool for link in links] == expected


def test_a_refusal_without_reading_or_of_another_loan_shows_no_reading() -> None:
    unread = [trajectory for trajectory in BACKGROUND if trajectory.id.startswith("unread")]
    for odd in (
        [_refusal(f"L{700 + n}", with_lookup=False) for n in range(6)],
        [_refusal(f"L{700 + n}", with_lookup=True, looks_at="L999") for n in range(6)],
    ):
        sample = [*odd, *unread]
        assert mine(views(sample), [trajectory.outcome for trajectory in sample]).links == []


def _refusal(loan: str, *, with_lookup: bool, looks_at: str = "") -> Trajectory:
    question = user(f"Please renew loan {loan} until tomorrow.")
    observed = looks_at or loan
    lookups = calls("find_loan", LOAN | {"loan": observed, "waiting": 2}, loan=observed) if with_lookup else []
    return talk(question, lookups, agent(f"Two readers wait for {loan}, so I cannot renew it."), name=f"refused{loan}")


def test_an_unknown_capability_and_a_broken_message_are_named() -> None:
    (known_items,) = discover(BACKGROUND, seed=0)[:1]
    with pytest.raises(AgentsError, match="no detector for 'telepathy'"):
        label(BACKGROUND, [replace(known_items, name="telepathy")], run=0, seed=0)
    malformed = talk(renewal("L1"), name="odd")
    del malformed.messages[1]["role"]
    with pytest.raises(TranscriptError, match="trajectory odd: message 1 has no role"):
        discover([malformed], seed=0)


def test_nothing_is_discovered_in_nothing() -> None:
    assert discover([], seed=0) == []
    assert label([], [], run=0, seed=0) == []
