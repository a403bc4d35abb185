"""The report: what the page and the table say, with and without results."""

import base64
import dataclasses
import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from store.records import INFORMATIVE_TASKS, WITHIN_TASKS, Finding
from store.types import GateAnswer, GateResult, Outcome, PairedDifference
from traced.evaluation.figures import (
    BASE,
    EPISODES,
    FLOOR,
    ON_TARGET,
    PRODUCTION,
    ROUTED,
    AdapterFigures,
    CandidateFigures,
    CompositionFigures,
    CycleFigures,
    Ending,
    GainOver,
    PromptFigures,
    SelfCheck,
    as_json,
    verdict,
)
from traced.evaluation.intervals import Change, Interval, Rate, RoutingQuality
from traced.evaluation.report import composition_sentence, render, summary_table, write_report

GATE = GateResult(
    "dates@v1",
    GateAnswer.PASS,
    [PairedDifference("target", 200, 0.4, 0.6, 0.2, 0.11, 0.29, 0.95, 0.0, GateAnswer.PASS)],
    rounds=1,
)


def figures() -> CycleFigures:
    def of(name: str, rate: float, lost_episodes: int = 0) -> Rate:
        return Rate(name, 300, round(300 * rate), rate, rate - 0.05, rate + 0.05, lost_episodes)

    return CycleFigures(
        cycle_id="desk-bundled-0-1",
        target="desk",
        model="bundled",
        seed=0,
        findings=[Finding("c", "dates", 0.5, 0.3, 0.1, 0.6, 10, 10, retained=True)],
        adapters=[
            AdapterFigures("dates@v1", "dates", GATE, "approved", is_promoted=True, test_rate=of("dates@v1", 0.5))
        ],
        endings=[Ending("errors", "admit", "rewards <b>never</b> differ")],
        curves={"dates": [{"iteration": 1.0, "reward": 0.2}, {"iteration": 2.0, "reward": 0.4}]},
        rates={
            FLOOR: of(FLOOR, 0.05),
            BASE: of(BASE, 0.4, lost_episodes=2),
            "dates@v1": of("dates@v1", 0.5),
            ROUTED: of(ROUTED, 0.6),
        },
        self_check=SelfCheck(5, 5, 1),
        gain=Interval(300, 300, 0.4, 0.6, 0.2, 0.13, 0.27, 0.95, 1.0),
        routers={"hidden-state": RoutingQuality(300, 270, 100, 80, 0.65, {"base": 200, "dates@v1": 100})},
        capabilities={"dates": Change(90, 0.2, 0.7)},
        rollouts=1024,
        seconds=700.04,
        peak_rss_bytes=2**31,
    )


def rendered_text(cycle: CycleFigures) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    with console.file:
        console.print(summary_table(cycle))
    return console.export_text()


def test_json_has_exactly_the_promised_keys() -> None:
    cycle = as_json(figures())
    assert cycle == {
        "verdict": "Composed minus base: +20.0 points [95 % interval +13.0 to +27.0] on 300 untouched test tasks.",
        "self_check": {"tasks": 5, "gold": 5, "nothing": 1, "fault": ""},
        "floor": 0.05,
        "base": 0.4,
        "composed": 0.6,
        "gain": 0.2,
        "ci": [0.13, 0.27],
        "test_seeds": 300,
        "adapters": [{"name": "dates@v1", "capability": "dates", "gate": "pass", "promoted": True, "alone": 0.5}],
        "capabilities": {"dates": {"before": 0.2, "after": 0.7}},
        "rollouts": 1024,
        "seconds": 700.0,
        "peak_rss_bytes": 2**31,
        "routing": {
            "hidden-state": {
                "accuracy": 0.9,
                "tasks": 300,
                "best": 270,
                "decisive": 100,
                "right": 80,
                "oracle": 0.65,
                "picks": {"base": 200, "dates@v1": 100},
            }
        },
    }


def test_json_of_a_comparison_adds_grpo_on_the_target() -> None:
    rates = figures().rates | {ON_TARGET: Rate(ON_TARGET, 300, 150, 0.5, 0.4, 0.6, 0)}
    gain_over = GainOver(ON_TARGET, Interval(300, 300, 0.5, 0.6, 0.1, 0.04, 0.16, 0.95, 1.0), 40, 10)
    cycle = dataclasses.replace(figures(), rates=rates, over_direct=gain_over)
    data: Any = as_json(cycle)
    assert (data["grpo_on_target"], data["over_grpo_on_target"]["ci"]) == (0.5, [0.04, 0.16])
    for text in (rendered_text(cycle), render(cycle, {})):
        sentence = "Composed minus GRPO on the target itself: +10.0 [+4.0 to +16.0]."
        assert sentence in " ".join(text.split())


COMPOSITION = CompositionFigures(
    [
        CandidateFigures("merged@v1", 200, 0.83, 1, "none"),
        CandidateFigures("router by labels", 200, 0.63, 2, "conversation"),
        CandidateFigures("base", 50, 0.4, 0, "none"),
    ],
    "base",
    dataclasses.replace(GATE.comparisons[0], name="target"),
    "router by labels",
)
SINGLE = GainOver("dates@v1", Interval(300, 300, 0.5, 0.6, 0.1, 0.04, 0.16, 0.95, 1.0), 40, 10)


def test_compositions_are_compared_and_said_to_serve() -> None:
    cycle = dataclasses.replace(figures(), composition=COMPOSITION, over_single=SINGLE)
    for text in (rendered_text(cycle), render(cycle, {})):
        words = " ".join(text.split())
        assert "Composed minus dates@v1 alone, the best single adapter: +10.0 [+4.0 to +16.0]." in words
        assert "Of 3 compositions merged@v1 was best on train seeds: 83.0 % of 200 tasks, +20.0 points against" in words
        assert "Serving: router by labels (2 adapters loaded, a routing decision per conversation)." in words
    assert "1 adapter loaded, no routing" in render(cycle, {})
    data: Any = as_json(cycle)
    assert data["over_best_single"] == {
        "name": "dates@v1",
        "gain": 0.1,
        "ci": [0.04, 0.16],
        "gains": 40,
        "losses": 10,
        "pairs": 300,
    }
    assert data["composition"]["candidates"][0]["success"] == 0.83
    base_only = dataclasses.replace(COMPOSITION, candidates=COMPOSITION.candidates[2:], gate=None, serving="a router")
    assert composition_sentence(base_only) == (
        "Of 1 compositions base was best on train seeds: 40.0 % of 50 tasks. Serving: a router."
    )


def test_validation_episodes_stand_beside_the_rollouts() -> None:
    cycle = dataclasses.replace(figures(), validation_episodes=416)
    assert as_json(cycle)["validation_episodes"] == 416
    assert "1024 training rollouts and 416 validation episodes, 700 s" in " ".join(render(cycle, {}).split())
    assert "1024 training rollouts, 700 s" in " ".join(render(figures(), {}).split())


def test_both_routers_are_shown_beside_each_other() -> None:
    labels = RoutingQuality(300, 105, 100, 38, 0.65, {"base": 10, "dates@v1": 290})
    both_routers = dataclasses.replace(figures(), routers=figures().routers | {"labels": labels})
    data: Any = as_json(both_routers)
    cycle = data["routing"]
    assert list(cycle) == ["hidden-state", "labels"]
    assert cycle["labels"] == {
        "accuracy": 0.35,
        "tasks": 300,
        "best": 105,
        "decisive": 100,
        "right": 38,
        "oracle": 0.65,
        "picks": {"base": 10, "dates@v1": 290},
    }
    for text in (rendered_text(both_routers), render(both_routers, {})):
        words = " ".join(text.split())
        assert "Routing by hidden-state was as good as the best choice on 90.0 % of 300 tasks" in words
        assert (
            "Routing by labels would have been as good as the best choice on 35.0 % of 300 tasks (38 of the 100"
            in words
        )
        assert "picks: base 10, dates@v1 290." in words


def test_table_shows_every_policy_with_its_interval_and_the_gain() -> None:
    text = rendered_text(figures())
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert [re.split(r"\s*│\s*", row)[1] for row in rows] == ["do nothing", "base model", "dates@v1 alone", "composed"]
    assert "60.0 % │ 55.0 % to 65.0 %" in text
    assert "Composed minus base: +20.0 points [95 % interval +13.0 to +27.0] on 300 untouched test tasks." in text
    assert "as good as the best choice on 90.0 % of 300 tasks (80 of the 100 where the choice matters)" in text
    assert "errors failed at the stage admit: rewards <b>never</b> differ" in text
    assert "2 episodes that failed by infrastructure are excluded" in text


def test_page_is_whole_escaped_and_self_contained(tmp_path: Path) -> None:
    page = write_report(figures(), tmp_path)
    text = page.read_text()
    parser = html.parser.HTMLParser()
    parser.feed(text)
    parser.close()
    assert "rewards &lt;b&gt;never&lt;/b&gt; differ" in text
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    embedded = re.findall(r"base64,([^\"]+)", text)
    on_disk = [(tmp_path / name).read_bytes() for name in ("capabilities.png", "training.png")]
    assert [base64.b64decode(picture) for picture in embedded] == on_disk
    assert all(picture.startswith(b"\x89PNG") for picture in on_disk)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capabilities.png", "report.html", "training.png"]


def test_the_page_says_what_a_gap_compares() -> None:
    finding = dataclasses.replace(figures().findings[0], counts={WITHIN_TASKS: 1, INFORMATIVE_TASKS: 2})
    assert "<td>within 2 tasks, which are few</td>" in render(dataclasses.replace(figures(), findings=[finding]), {})


def test_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    pages = [write_report(figures(), tmp_path / name).read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"findings": [], "adapters": []}, "No capability was found lacking, so no adapter was trained."),
        (
            {"findings": [], "adapters": [], "collected": {Outcome.SUCCESS: 1, Outcome.FAILURE: 7}},
            "No capability was found lacking, so no adapter was trained.",
        ),
        (
            {"findings": [], "adapters": [], "collected": {Outcome.FAILURE: 8, Outcome.INFRASTRUCTURE: 1}},
            "No adapter was trained: none of the 8 collected episodes succeeded, and a capability is found by "
            "comparing failures with successes. Take more of them (collect.episodes), or a stronger model.",
        ),
        (
            {"findings": [], "adapters": [], "collected": {Outcome.SUCCESS: 8}},
            "No adapter was trained: all 8 collected episodes succeeded, so there are no failures to learn from.",
        ),
        (
            {
                "findings": [],
                "adapters": [],
                "collected": {Outcome.FAILURE: 8},
                "analysed": {EPISODES: 8, PRODUCTION: 3},
            },
            "No capability was found lacking, so no adapter was trained.",
        ),
        (
            {"adapters": [], "endings": []},
            "No adapter was trained: every retained capability failed at an earlier stage.",
        ),
        (
            {"adapters": [], "endings": [Ending("errors", "admit", "rewards never differ")]},
            "No adapter was trained: every retained capability failed at an earlier stage "
            "(errors at admit: rewards never differ).",
        ),
        ({}, "No adapter was promoted, so no composition was evaluated."),
    ],
)
def test_a_cycle_without_a_gain_states_the_reason(change: dict[str, object], sentence: str) -> None:
    without_adapters = dataclasses.replace(
        figures(),
        gain=None,
        routers={},
        rates={},
        capabilities={},
        curves={},
        **change,  # type: ignore[arg-type]
    )
    assert verdict(without_adapters) == sentence
    assert sentence in rendered_text(without_adapters).replace("\n", " ")
    assert sentence in render(without_adapters, {})
    assert as_json(without_adapters)["gain"] is None
    assert as_json(without_adapters)["verdict"] == sentence


def test_an_interval_around_zero_is_called_no_gain() -> None:
    flat = dataclasses.replace(figures(), gain=Interval(300, 300, 0.4, 0.41, 0.01, -0.03, 0.05, 0.95, 1.0))
    assert verdict(flat).endswith("The interval contains zero: no gain is shown.")


def with_prompts(answer: str, is_enough: bool) -> CycleFigures:
    comparison = PairedDifference("environment", 24, 0.25, 1.0, 0.75, 0.5, 0.9, 0.95, 0.02, GateAnswer.PASS)
    gates = {"prompt": GateResult("base+0123", GateAnswer.PASS, [comparison], 1)}
    prompts = [PromptFigures("<b>dates</b>", "3f2a4b5c6d7e", answer, gates, is_enough)]
    ending = Ending("<b>dates</b>", "optimize-prompt", f"{answer}: traced show patch 3f2a4b5c6d7e")
    return CycleFigures("c", "desk", "bundled", 0, findings=figures().findings, prompts=prompts, endings=[ending])


def test_a_sufficient_prompt_is_reported_once_with_its_command() -> None:
    cycle = with_prompts("a prompt is enough", True)
    text = " ".join(rendered_text(cycle).split())
    assert (
        "<b>dates</b>: a prompt is enough (25.0 % to 100.0 % in its environment); "
        "traced show patch 3f2a4b5c6d7e --into FILE writes it" in text
    )
    assert "failed at the stage" not in text
    assert verdict(cycle) == "No adapter was trained; a prompt is enough for <b>dates</b>."
    page = render(cycle, {})
    assert "&lt;b&gt;dates&lt;/b&gt;: a prompt is enough." in page
    assert "base, prompt" in page
    assert as_json(cycle)["prompts"] == [
        {"capability": "<b>dates</b>", "patch": "3f2a4b5c6d7e", "enough": "a prompt is enough", "decision": ""}
    ]
    command = dataclasses.replace(
        cycle, prompts=[dataclasses.replace(cycle.prompts[0], decision="approved by <i>ann</i>")]
    )
    assert "FILE writes it; approved by <i>ann</i>" in " ".join(rendered_text(command).split())
    assert "3f2a4b5c6d7e</code>; approved by &lt;i&gt;ann&lt;/i&gt;" in render(command, {})


def test_an_insufficient_prompt_is_reported_beside_the_ending() -> None:
    cycle = with_prompts("neither", False)
    text = " ".join(rendered_text(cycle).split())
    assert "<b>dates</b>: neither" in text
    assert "writes it" not in text
    assert "<b>dates</b> failed at the stage optimize-prompt" in text
    assert verdict(cycle).startswith("No adapter was trained: every retained capability")
