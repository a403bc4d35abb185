"""The evidence for a decision: quoted failures, and the world of the environment."""

from types import SimpleNamespace
from typing import cast

from rich.console import Console

from tests.unit.store.chain import T0
from traced.client.approvals import (
    CapabilityLineage,
    Case,
    EnvironmentLineage,
    ExampleView,
    OmittedToolView,
    ShareView,
    ToolAgreementView,
    TrainingLineage,
    WorldView,
)
from tui.screens.decision import lineage, status_text

SHARE = ShareView(count=10, share=1.0, low=0.72, high=1.0)
UNMEASURED = ShareView(count=0, share=0.0, low=0.0, high=1.0)


def tool(name: str, calls: int, not_recorded: int, share: ShareView) -> ToolAgreementView:
    is_total = name.startswith("all ")
    shares = {"exact": share, "error_class": share}
    return ToolAgreementView(
        tool=name, is_write=True, is_total=is_total, calls=calls, not_recorded=not_recorded, **shares
    )


def test_the_lineage_has_examples_with_reasons_and_the_world_by_tool() -> None:
    capability = CapabilityLineage(
        name="dates",
        title="Dates",
        description="Reads dates.",
        deficit="guesses dates",
        delta=0.4,
        basis="within 7 tasks",
        coverage=0.3,
        runs=2,
        runs_agreeing=2,
    )
    environment = EnvironmentLineage(hash="ab" * 32, synthesizer="llm", seed=1, admitted=True, checks=14, failed=[])
    run = TrainingLineage(
        id="r",
        model="m",
        seed=0,
        seeds=[],
        state="finished",
        iterations=0,
        rollouts=8,
        first_reward=None,
        last_reward=None,
        started_at=T0,
        finished_at=None,
    )
    example = ExampleView(
        trajectory_id="router-1",
        task_id="7",
        runs=2,
        message_index=3,
        role="assistant",
        request="Cancel my order.",
        text="→ cancel(\x1b[31m)",
        reason="It did not ask.",
        policy="Ask first.",
    )
    agreement = {
        "held out": [
            tool("cancel", 12, 2, SHARE),
            tool("pay", 9, 0, SHARE),
            tool("find", 5, 5, UNMEASURED),
            tool("all reads", 5, 5, UNMEASURED),
        ]
    }
    omitted = [OmittedToolView(tool="pay", text="pay\x1b[31m: of 9 answered held out calls 10 % exact")]
    world = WorldView(digest="cd" * 32, conversations=225, agreement=agreement, omitted=omitted)
    case = SimpleNamespace(
        capability=capability,
        examples=[example],
        environment=environment,
        world=world,
        training=run,
        cycle_id="c",
        target="t",
        cycle_state="waiting",
    )
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(lineage(case))  # type: ignore[arg-type]
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines[0].startswith("capability  Dates: Δ 40 points (within 7 tasks), coverage 30 %")
    assert "            lacking: guesses dates" in lines
    place = lines.index("lacking in  router-1, message 3")
    assert lines[place + 1] == "              user: Cancel my order."
    assert lines[place + 2].startswith("              assistant: → cancel(")
    assert '              policy: "Ask first."' in lines
    assert "world       cdcdcdcdcdcd, made of 225 conversations; replayed calls:" in lines
    shares = "exact 100 % [72, 100], error class 100 % [72, 100]"
    assert lines[lines.index("            held out conversations:") + 1 :][:3] == [
        f"              cancel (writes): 10 of 12 answered, 2 not recorded; {shares}",
        "              all reads: 0 of 5 answered, 5 not recorded",
        "              none of the calls answered: find (5)",
    ]
    place = lines.index("            omitted tools, which the world does not answer because its answers were wrong:")
    assert lines[place + 1].endswith(": of 9 answered held out calls 10 % exact")
    assert lines[place + 1].startswith("              pay")
    assert "\x1b" not in "".join(lines)


def test_a_pending_decision_shows_that_the_live_system_has_fallen() -> None:
    gate = SimpleNamespace(answer="pass", rounds=1, at=T0)

    def text(status: str, fallen: list[str]) -> str:
        adapter = SimpleNamespace(name="dates@v2", standing=status, decision=None)
        case = SimpleNamespace(
            adapter=adapter,
            gates=[gate],
            asked=None,
            live=False,
            trial="",
            looks=4,
            fallen=fallen,
            untested="",
            handover="",
        )
        return status_text(cast(Case, case)).plain

    text_of_fall = "held: the live system does worse than before in the environments of seats@v1, tools@v2"
    assert text_of_fall in text("waiting", ["seats@v1", "tools@v2"])
    assert "held" not in text("waiting", [])
    assert "held" not in text("not passed", ["seats@v1"])
