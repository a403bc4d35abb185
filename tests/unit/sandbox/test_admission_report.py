"""How a report reads: every check has its words, figures stand beside their bounds, hostile text harms nobody."""

import json
from typing import Any

import pytest

from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.report import MEANS, advice, as_data, as_text, bounds, means, unchecked, verdict
from sandbox.admission.report.advice import ADVICE
from sandbox.admission.report.html import page
from sandbox.admission.report.model import details, figures
from store.types import AdmissionReport, Check
from tests.unit.sandbox.reports import REPORT_TIME, advice_text, failed, printed, report_of

RATES = {"reward": 1.0, "success": 1.0}
FLOOR = {
    "empty": {"reward": 0.41, "success": 0.4},
    "refusing": {"reward": 0.1, "success": 0.0},
    "random": {"reward": 0.05, "success": 0.0},
    "allowed": {"reward": 0.2, "success": 0.05},
    "seeds": 32,
}
DIVERSITY = {
    "seeds": 160,
    "distinct": 0.95,
    "distinct_required": 0.9,
    "shapes": 3,
    "shape_fraction": 0.02,
    "shapes_required": 6,
    "commonest_shape": 0.71,
    "commonest_allowed": 0.5,
}


SLIP = {"tool": "hang_up", "argument": "hook", "slip": "another value", "paid": 51, "seeds": 52}


def test_every_check_that_admission_makes_has_its_words() -> None:
    assert list(MEANS) == list(CHECK_NAMES)
    assert set(ADVICE) == set(CHECK_NAMES)
    for name in CHECK_NAMES:
        assert 10 < len(means(name)) < 120
        assert all(advice(failed(name)))
        assert advice(failed(name))
        assert advice(Check(name, True, {}, 0.1)) == []


def test_a_check_of_another_version_is_read_by_its_figures() -> None:
    assert means("balance") == ""
    assert (
        advice_text("balance", tilt=0.7, tilt_allowed=0.2)
        == "Bring these within their bounds: tilt is 0.7 and must be ≤ 0.2."
    )
    assert advice_text("balance") == "See the evidence for what it found."


def test_figures_stand_beside_their_bounds() -> None:
    figures_by_name = {figure.name: figure for figure in figures(DIVERSITY)}
    assert list(figures_by_name) == ["seeds", "distinct", "shapes", "shape_fraction", "commonest_shape"]
    assert (figures_by_name["distinct"].needs, figures_by_name["distinct"].kept) == ("≥ 0.9", True)
    assert (figures_by_name["shapes"].needs, figures_by_name["shapes"].kept) == ("≥ 6", False)
    assert (figures_by_name["commonest_shape"].needs, figures_by_name["commonest_shape"].kept) == ("≤ 0.5", False)
    assert figures_by_name["shape_fraction"].kept is None
    assert bounds({"reset_p95": 0.1, "reset_allowed": 0.5})["reset_p95"].key == "reset_allowed"
    [mean] = figures({"mean": 0.99, "mean_allowed": [0.05, 0.95]})
    assert (mean.needs, mean.kept) == ("within 0.05 to 0.95", False)
    rates = {figure.name: figure for figure in figures(FLOOR)}
    assert list(rates)[:2] == ["empty reward", "empty success"]
    assert rates["empty reward"].kept is False
    assert rates["refusing reward"].needs == "≤ 0.2"
    [share, seeds] = figures({"share": 0.25, "allowed": 0.05, "seeds": 3})
    assert (share.needs, seeds.needs) == ("≤ 0.05", "")


@pytest.mark.parametrize(
    ("name", "evidence", "words"),
    [
        ("source", {"refused": ["line 3: imports os"]}, ["line 3: imports os", "Only these modules", "random"]),
        ("source", {"refused": ["line 9: reads the clock: now()"]}, ["draw it from the seed"]),
        (
            "determinism",
            {"seed": 7, "where": "other process", "difference": "'a' against 'b'"},
            ["Seed 7", "Sort sets"],
        ),
        (
            "determinism",
            {"seed": 7, "where": "again", "difference": "'<x at 0x7f00aa12bb>' against '<x at 0x7f00aa99bb>'"},
            ["address in memory"],
        ),
        (
            "determinism",
            {"seed": 7, "where": "again", "difference": "'at 12:30:01 now' against 'at 12:30:02 now'"},
            ["time of day"],
        ),
        (
            "determinism",
            {
                "seed": 7,
                "where": "other process",
                "difference": "'[red, blue, green, tan' against '[green, tan, red, blue'",
            },
            ["another order"],
        ),
        (
            "oracle",
            {"seeds": 8, "failed": 3, "first": {"seed": 5, "reward": 0.5, "success": False, "done": False}},
            [
                "3 of 8 seeds",
                "Seed 5 ends with reward 0.5, no success and the episode not done",
                "Let the oracle go on",
            ],
        ),
        (
            "oracle",
            {"seeds": 8, "failed": 8, "first": {"seed": 5, "reward": 1.0, "success": False, "done": True}},
            ["every one of 8 seeds", "must come with success"],
        ),
        (
            "oracle",
            {"seeds": 8, "failed": 0, "unearned": 2, "first": {"seed": 5}},
            ["On 2 of 8 seeds an agent that sends the oracle's own messages is not rewarded"],
        ),
        (
            "oracle",
            {"seeds": 8, "unearned": 2, "first": {"seed": 5, "parting": 'to message 2 the agent is answered "no"'}},
            ['On seed 5 to message 2 the agent is answered "no": step() must answer both alike'],
        ),
        (
            "determinism",
            {"seed": 7, "where": "the oracle's messages with its score asked for after every message"},
            ["score() must only look"],
        ),
        (
            "leak",
            {
                "share": 0.0,
                "allowed": 0.05,
                "unseen": 0.5,
                "unseen_allowed": 0.2,
                "first_unseen": {"seed": 9, "text": "W"},
            },
            [
                "On 50 % of the seeds the oracle uses a code that no message has told",
                "never the value itself",
                "9 uses: W",
            ],
        ),
        (
            "diversity",
            {"ways": 1, "ways_required": 3, "usual_way": 1.0, "usual_allowed": 0.8},
            ["in wording more than in work", "takes is 1, and at least 3", "holds 100 % of the seeds, at most 80 %"],
        ),
        ("diversity", DIVERSITY, ["on 160 seeds is 3", "One structure holds 71 %"]),
        (
            "floor",
            FLOOR,
            ["says nothing (empty) reaches mean reward 0.41 and success rate 0.4", "need the right writes"],
        ),
        (
            "exploits",
            {"a": RATES, "b": RATES, "c": RATES, "allowed": {"reward": 0.5, "success": 0.1}},
            ["3 agents, one that plays a, one that plays b, one that plays c, reach up to mean reward 1"],
        ),
        (
            "exploits",
            {"new_trick": RATES, "b": {"reward": 0, "success": 0}, "allowed": {"reward": 0.5, "success": 0.1}},
            ["An agent that plays new_trick reaches mean reward 1 and success rate 1; at most mean reward 0.5"],
        ),
        ("slips", {"loose": [{**SLIP, "slip": "left out"}]}, ["paid in full although a call is left out", "all of it"]),
        (
            "slips",
            {"loose": [SLIP, {**SLIP, "slip": "nothing"}]},
            ["hook of hang_up is another seed's (on 51 of 52 seeds). Grade that argument"],
        ),
        ("slips", {"loose": [{**SLIP, "slip": "nothing"}]}, ["hook of hang_up is empty", "Compare whole values"]),
        ("slips", {"loose": [{"slip": "a later version's"}], "paid": 1.0, "paid_allowed": 0.9}, ["paid is 1"]),
        ("interface", {"tools": 2, "foreign": ["fly"], "changed": []}, ["no such tools: fly"]),
        ("interface", {"tools": 0}, ["No task offers a tool"]),
        (
            "interface",
            {"odd_errors": ["think({}) is answered with ''"], "error_examples": ["Error: no such user"]},
            ["think({}) is answered with ''. Answer it in the form of 'Error: no such user'"],
        ),
        ("interface", {"unanswered": ["calls ['a'] got answers to []"]}, ["not answered exactly once"]),
        (
            "leak",
            {"share": 0.25, "allowed": 0.05, "first": {"seed": 3, "text": "W1"}},
            ["25 %", "Seed 3 gives away: W1"],
        ),
        (
            "latency",
            {"reset_p95": 0.9, "reset_allowed": 0.5, "step_p95": 0.1, "step_allowed": 0.2},
            ["reset takes 0.9 s"],
        ),
        ("effects", {"events": ["open('x')"] * 3, "printed_characters": 0}, ["open('x'), 3 times"]),
        (
            "spread",
            {"mean": 0.01, "mean_allowed": [0.05, 0.95], "mixed": 0.1, "mixed_required": 0.5},
            ["too hard", "10 %"],
        ),
        (
            "floor",
            {
                "fault": "EnvironmentFault",
                "text": "environment failed in 'step': KeyError: 'x'",
                "at": "seed 4",
                "traceback": 'File "environment.py", line 12, in step\nFile "environment.py", line 30, in _find\n',
            },
            ["seed 4", "answer a bad call", "line 30 of the file, in _find"],
        ),
        ("runs", {"fault": "WorkerDied", "text": "it ran out of memory"}, ["used up its container's memory"]),
        ("runs", {"fault": "Deadline", "text": "environment call 'step' outlived its 2 s"}, ["took too long"]),
    ],
)
def test_advice_is_of_the_check_and_of_its_figures(name: str, evidence: dict[str, Any], words: list[str]) -> None:
    for sentence in words:
        assert sentence in advice_text(name, **evidence)


def test_advice_covers_offenders_only() -> None:
    sentences = advice_text("floor", **FLOOR)
    assert "refuses" not in sentences
    assert "by chance" not in sentences
    assert "another order" not in advice_text(
        "determinism", where="again", difference="'[1.0, true, x' against '[0.5, false, x'"
    )


def test_the_verdict_names_unchecked_parts() -> None:
    sound = Check("source", True, {"bytes": 4}, 0.1)
    left_out = Check("spread", True, {"left_out": "no base model was given"}, 0.1)
    partial = Check("interface", True, {"tools": 3, "target": "not compared: no target was given"}, 0.1)
    assert (verdict(report_of(sound)), unchecked(report_of(sound))) == ("admitted", [])
    partly = report_of(sound, partial, left_out)
    assert verdict(partly) == "admitted as far as could be checked"
    assert [(entry.check, entry.why) for entry in unchecked(partly)] == [
        ("interface", "not compared: no target was given"),
        ("spread", "no base model was given"),
    ]
    refused_report = report_of(sound, failed("runs"))
    assert verdict(refused_report) == "refused"
    assert [entry.check for entry in unchecked(refused_report)] == [*CHECK_NAMES[CHECK_NAMES.index("runs") + 1 :]]
    assert "determinism, oracle, " in printed(refused_report)


def test_a_check_newer_than_the_report_is_not_listed_as_unchecked() -> None:
    older = [Check(name, name != "leak", {}, 0.1) for name in CHECK_NAMES if name not in ("slips", "spread")]
    assert [entry.check for entry in unchecked(report_of(*older))] == ["spread"]
    assert unchecked(report_of(*(entry for entry in older if entry.passed))) == []
    assert "slips" not in printed(report_of(*older))


EXAMPLES = [
    {
        "seed": 11,
        "what": "Success without a write.",
        "transcript": [
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "get_order", "arguments": '{"order_id": "W1"}'}}],
            },
            {"role": "tool", "content": "{}"},
        ],
    }
]


def test_examples_appear_in_all_three_forms() -> None:
    report = report_of(failed("floor", **FLOOR, examples=EXAMPLES))
    for form in (printed(report), page(report, "lamp_shop.py", REPORT_TIME).replace("&#34;", '"')):
        assert "Seed 11" in form
        assert "Success without a write." in form
        assert 'get_order({"order_id": "W1"})' in form
    data: Any = as_data(report)
    [check] = data["checks"]
    assert check["examples"][0]["transcript"][1] == {"role": "assistant", "text": 'get_order({"order_id": "W1"})'}
    assert all("examples" not in sample for sample, _ in details({"examples": EXAMPLES}))


POLICY_RATES = {f"policy_{n}": {"reward": 0.0, "success": 0.0} for n in range(20)} | {"greedy": RATES}
EXPLOITS = {**POLICY_RATES, "allowed": {"reward": 0.5, "success": 0.1, "faults": 0.0}, "seeds": 32}


def test_policies_out_of_bounds_are_listed_and_the_rest_counted() -> None:
    report = report_of(failed("exploits", **EXPLOITS), failed("diversity", **DIVERSITY))
    output = " ".join(printed(report).replace("│", " ").split())
    assert "1 of 21 policies · greatest reward 1 (needs ≤ 0.5) · greatest success 1 (needs ≤ 0.1)" in output
    assert "20 other policies keep these bounds" in output
    assert "shapes 3 (needs ≥ 6) · commonest_shape 0.71 (needs ≤ 0.5) · 1 other within its bound" in output
    assert "policy_7" not in output
    text = page(report, "lamp_shop.py", REPORT_TIME)
    head, _, folded = text.partition("<details>")
    assert "greedy" in head
    assert "policy_7" not in head
    assert "policy_7" in folded.partition("</details>")[0]
    assert "<details>" not in page(
        report_of(Check("exploits", True, {**EXPLOITS, "greedy": {}}, 0.1)), "x.py", REPORT_TIME
    )


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (failed("runs", fault="WorkerDied", text="it ran out of memory"), "The environment used up its container's"),
        (failed("source", bytes=70, refused=["line 3: imports os"]), "Change these lines: line 3: imports os."),
        (failed("oracle", seeds=20, failed=0, unearned=20), "On 20 of 20 seeds an agent that sends the oracle's own"),
        (failed("determinism", seed=7, where="again", difference="'a' against 'b'"), "Seed 7, played a second time"),
    ],
    ids=lambda parameter: getattr(parameter, "name", ""),
)
def test_a_failure_without_a_figure_shows_its_advice_in_the_row(check: Check, reason: str) -> None:
    table = printed(report_of(check)).partition("└")[0]
    assert reason in " ".join(table.replace("│", " ").split())


def test_an_unavailable_check_is_neither_passed_nor_failed() -> None:
    passed_check = Check("oracle", True, {}, 1.0)
    for passed in (True, False):  # where nothing was asked, and where nothing could be played
        report = report_of(passed_check, Check("spread", passed, {"left_out": "no base model was given"}, 0.0))
        for form in (printed(report), page(report, "lamp_shop.py", REPORT_TIME)):
            assert "1 of 1 checks passed, 1 not run, in 1.0 s" in form
            assert "no base model was given" in form
            assert ("What to change" in form, form.count("✗")) == (False, 0)
        data: Any = as_data(report)
        assert [entry["made"] for entry in data["checks"]] == [True, False]


def test_the_data_is_one_json_object_with_the_documented_keys() -> None:
    report = report_of(failed("floor", **FLOOR, odd=float("nan"), text="\ud800 & \u200b"))
    data = json.loads(json.dumps(as_data(report), allow_nan=False))
    assert list(data) == ["environment", "admitted", "verdict", "seconds", "not_checked", "checks"]
    [check] = data["checks"]
    assert list(check) == ["name", "passed", "made", "seconds", "means", "figures", "examples", "advice", "evidence"]
    first = {"name": "empty reward", "value": "0.41", "needs": "≤ 0.2", "kept": False, "means": "mean reward"}
    assert check["figures"][0] == first
    assert check["evidence"]["odd"] is None
    assert check["evidence"]["empty"] == FLOOR["empty"]
    json.dumps(data, ensure_ascii=False).encode("utf-8")


def test_flat_objects_are_rendered_line_by_line_and_others_as_json() -> None:
    loose = [SLIP, {**SLIP, "slip": "nothing"}]
    assert dict(details({"loose": loose}))["loose"].splitlines() == [
        " · ".join(f"{name} {value}" for name, value in row.items()) for row in loose
    ]
    assert dict(details({"loose": [{"tool": {"deep": [1]}}]}))["loose"].startswith("[\n")


def test_a_failure_that_several_checks_share_stands_once_under_the_method_that_raised() -> None:
    frames = 'File "/app/sandbox/worker.py", line 3, in oracle\nFile "environment.py", line 9, in reset\n'
    fault = {
        "fault": "EnvironmentFault",
        "text": "environment failed in 'oracle': TypeError: x",
        "at": "seed 7",
        "traceback": f'{frames}File "environment.py", line 12, in _draw\nTypeError: x',
    }
    text = as_text(AdmissionReport("hash", False, [Check(name, False, fault, 0.1) for name in ("oracle", "leak")]))
    assert text.count("reset(seed) must return a Task") == 1
    assert "oracle() must yield" not in text
    assert text.count("It raised at line 12 of the file, in _draw.") == 1
    assert "- The same failure as in oracle." in text
    assert text.count("/app/sandbox/worker.py") == 1


def test_a_panel_that_fails_as_a_whole_is_named_by_its_first_figures() -> None:
    policies = {f"p{n:02d}": {"reward": 0.9, "success": 0.0, "faults": 0.0} for n in range(12)}
    evidence = {**policies, "allowed": {"reward": 0.5, "success": 0.1, "faults": 0.0}, "seeds": 32}
    text = as_text(AdmissionReport("hash", False, [Check("exploits", False, evidence, 0.1)]))
    assert "- p07 reward is 0.9" in text
    assert "- p08 reward is" not in text
    assert "- 4 further figures miss their bounds" in text
