"""The lines of the evidence behind an adapter: who decided, reasons, figures of the training, short lines."""

from collections import Counter
from types import SimpleNamespace

from store.records import INFORMATIVE_TASKS, WITHIN_TASKS, Citation, Finding, IterationMetrics
from store.types import Verdict
from traced.cli.evidence_text import (
    INDENT,
    _citation_lines,
    _example_lines,
    _finding,
    _training,
    _world_lines,
    iteration_lines,
    outcomes_text,
    wrapped,
)
from traced.evaluation.examples import Example
from traced.evaluation.intervals import mean_share
from traced.evaluation.world_agreement import HELD_OUT_CALLS, OmittedTool, ToolAgreement, WorldFigures
from traced.scoring.evidence import OutcomeSources


def test_citations_have_their_reasons() -> None:
    citations = [
        Citation("c", "x", 0, "t-1", 7, "the fee was not \x1b[31mchecked", "Check the fee first."),
        Citation("c", "x", 1, "t-2", 9),
    ]
    lines = list(_citation_lines(SimpleNamespace(faults={}, citations=citations)))  # type: ignore[arg-type]
    assert lines[0] == "citations    message 7 of t-1, message 9 of t-2"
    (reason,) = lines[1:]
    assert reason.strip().startswith("message 7: the fee was not")
    assert reason.endswith('; the policy says "Check the fee first."')
    assert "\x1b" not in reason


def test_a_gap_says_what_it_compares() -> None:
    counts = {WITHIN_TASKS: 1, INFORMATIVE_TASKS: 2}
    line = _finding(Finding("c", "dates", 0.5, 0.3, 0.1, 0.6, 10, 9, retained=True, counts=counts))
    assert line.startswith("contrast     gap +0.50 (within 2 tasks, which are few), coverage 0.30, 9 of 10 runs agree")
    line = _finding(Finding("c", "dates", 0.5, 0.3, 0.1, 0.6, 10, 9, retained=True))  # of an earlier version
    assert line.startswith("contrast     gap +0.50, coverage 0.30, ")


def test_records_of_feedback_are_no_people() -> None:
    script = OutcomeSources(Counter(people=225, rules=3), Counter({"": 225}))
    assert outcomes_text(script) == "225 by feedback, 3 by rules"
    by_names = OutcomeSources(Counter(people=9, nobody=1), Counter({"Ada": 6, "Bo": 2, "": 1}))
    assert outcomes_text(by_names) == "9 by feedback (6 of Ada, 2 of Bo, 1 without a name), 1 undecided"
    assert outcomes_text(OutcomeSources(Counter(), Counter())) == "none"
    # Names that are equal as far as they are shown count as one.
    authors = Counter({f"{'x' * 40}a": 2, f"{'x' * 40}b": 3})
    assert f"(5 of {'x' * 40}… " in outcomes_text(OutcomeSources(Counter(people=5), authors))


def test_examples_quote_message_reason_and_policy() -> None:
    chain = SimpleNamespace(trajectories=[SimpleNamespace(id=key, verdicts={0: Verdict.LACKING}) for key in "abc"])
    examples = [
        Example("t1", "7", 2, 3, "assistant", "Cancel it.", "→ cancel\x1b[31m({})", "It did not ask.", "Ask first."),
        Example("t2", "8", 1, 5, "assistant", "Hi.", "Done."),
    ]
    lines = list(_example_lines(chain, examples))  # type: ignore[arg-type]
    assert lines[0] == "lacking in   3 trajectories, for example:"
    assert lines[1:3] == [f"{INDENT}t1, message 3", f"{INDENT}  user: Cancel it."]
    assert lines[3].startswith(f"{INDENT}  assistant: → cancel")
    assert "\x1b" not in lines[3]
    assert lines[4:6] == [f"{INDENT}  reason: It did not ask.", f'{INDENT}  the policy says "Ask first."']
    assert lines[6:9] == [f"{INDENT}t2, message 5", f"{INDENT}  user: Hi.", f"{INDENT}  assistant: Done."]
    assert list(_example_lines(SimpleNamespace(trajectories=[]), [])) == []  # type: ignore[arg-type]


def test_tools_that_the_world_omits_are_not_listed_as_answered() -> None:
    answers = mean_share([("1", 0.0), ("2", 1.0)])
    rows = [ToolAgreement(name, False, *[answers] * 6) for name in ("get", "find\x1b[31m")]
    omitted = OmittedTool("find\x1b[31m", HELD_OUT_CALLS, answers, answers)
    lines = list(_world_lines(SimpleNamespace(), WorldFigures("d" * 64, 12, {HELD_OUT_CALLS: rows}, [omitted])))  # type: ignore[arg-type]
    place = lines.index(f"{INDENT}omitted tools, which the world does not answer because its answers were wrong:")
    assert [line.strip().split(":")[0] for line in lines[2:place]] == ["get"]
    (line,) = lines[place + 1 :]
    assert line.strip().startswith("find")
    assert ": of 2 answered held out calls 50 % [" in line
    assert "\x1b" not in line


def test_figures_of_a_training_are_grouped() -> None:
    first = {"reward": 0.5, "success": 0.25, "validation_success": 0.1, "lost_groups": 1, "entropy": float("nan")}
    last = {"reward": 0.75, "success": 0.25, "validation_success": None, "lost_groups": 2, "entropy": 0.01}
    lines = list(iteration_lines([IterationMetrics("r", 1, first), IterationMetrics("r", 2, last)]))  # type: ignore[arg-type]
    assert [line.split() for line in lines] == [
        ["rollouts", "reward", "0.50", "to", "0.75,", "success", "25%"],
        ["validation", "success", "10%"],
        ["policy", "entropy", "0.01"],
        ["losses", "3", "groups", "lost"],
    ]
    assert list(iteration_lines([])) == []


def test_a_training_without_rollouts_does_not_count_them() -> None:
    run = SimpleNamespace(id="r", state="finished", seed=0, config={}, rollouts=0, detail="merged from two")
    lines = list(_training(SimpleNamespace(training=run, iterations=[])))  # type: ignore[arg-type]
    assert lines == ["training     r: finished, seed 0", f"{INDENT}merged from two"]


def test_long_lines_are_broken_at_words() -> None:
    line = f"gate         {'word ' * 30}"
    first, *further_lines = wrapped(line, 80).splitlines()
    assert first.startswith("gate         word")
    assert all(other.startswith(f"{INDENT}word") for other in further_lines)
    deeper = wrapped(f"{INDENT}  {'word ' * 30}", 80).splitlines()
    assert deeper[1].startswith(f"{INDENT}    word")
    assert all(len(text) <= 80 for text in [first, *further_lines, *deeper])
