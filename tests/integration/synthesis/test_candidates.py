"""What a model's answers lead to before any container: refused candidates, repairs, fresh starts, and budgets."""

import re
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agents.errors import ModelRefused
from store.records import EnvironmentRecord
from store.repositories.environments import save_admission
from store.repositories.llm_replies import stage_costs
from store.types import AdmissionReport, Check
from tests.integration.synthesis.way import run_with_context, walk
from tests.integration.synthesis.world import CANARIES, NAME, environments_of, fenced, fixture, prepared, refused_by
from tests.scripted_model import Refusal, Scripted, ScriptedReply, Status, Text, Truncated, scripted_server
from tests.unit.store.chain import T0
from traced.core.errors import CapabilityError
from traced.llm.connection import LlmError
from traced.pipeline.context import Context
from traced.pipeline.synthesize import synthesize

NO_FILE = "I think that an environment about coats would be best."


def message_text(body: Mapping[str, Any], place: int = -1) -> str:
    """One message of a request."""
    return str(body["messages"][place]["content"])


def run_cycle(tmp_path: Path, server: Scripted, overrides: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A prepared cycle's way, to its end; the cycle is told in the answer."""
    cycle = prepared(tmp_path, server.url, overrides)
    return {"cycle": cycle, **run_with_context(cycle, tmp_path, server.url, overrides or {}, walk)}


def look(tmp_path: Path, server: Scripted, report: Mapping[str, str], overrides: Mapping[str, Any], work: Any) -> Any:
    return run_with_context(report["cycle"], tmp_path, server.url, overrides, work)


def test_five_repairs_and_then_a_fresh_start_three_times(tmp_path: Path) -> None:
    with scripted_server(lambda body, nth: f"{NO_FILE} ({nth})", canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server)
        records = look(tmp_path, server, report, {}, environments_of)
    assert report["reason"] == "admit: none of 18 candidate environments was admitted"
    assert [len(body["messages"]) for body in server.requests] == [2, 4, 4, 4, 4, 4] * 3
    for nth, body in enumerate(server.requests):
        if nth % 6:
            assert f"{NO_FILE} ({nth - 1})" in message_text(body, 2)
            assert "Failed: source" in message_text(body)
            assert ("refused by source" in message_text(body)) == (nth % 6 > 1)
    [start] = {message_text(body, 1) for body in server.requests}
    assert '"lacking here": true' in start  # what the canaries stand beside
    size = re.search(r"The file has at most (\d+) KiB", start)
    assert size is not None
    assert 240 < int(size[1]) < 256  # policy and tools stand above it
    assert len({record.hash for record in records}) == 18
    assert [record.seed for record in records] == list(range(18))
    assert {record.synthesizer for record in records} == {"llm"}
    assert [record.repairs for record in records[:3]] == [None, records[0].hash, records[1].hash]
    assert [record.repairs is None for record in records] == [nth % 6 == 0 for nth in range(18)]


HUGE = "class Environment:\n    pass\n" + "# " + "x" * 1_000_000
FAMILIES = Path(__file__).parents[2] / "data/attacks"  # what sandboxes are attacked with
ATTACKS = {
    "writes a file": "open({marker!r}, 'w').write('x')\n",
    "starts a program": "import os\nos.system('touch ' + {marker!r})\n",
    "speaks to the network": "import socket\nsocket.create_connection(('127.0.0.1', 9))\n",
    "forks for ever": "import os\nwhile True:\n    os.fork()\n",
    "reads proc": "print(open('/proc/self/environ').read())\n",
    "imports by name": "__import__('pathlib').Path({marker!r}).touch()\n",
}
ANSWERS: dict[str, ScriptedReply] = {
    "a refusal": Refusal("I will not write that."),
    "prose": NO_FILE,
    "nothing": "",
    "an empty file": "```python\n```",
    "a sketch": "```python\nclass Env: ...\n```",
    "cut off": Truncated(fenced(fixture("cloakroom"))[:900]),
    "cut off and not said": fenced(fixture("cloakroom"))[:900],
    "too large": f"```python\n{HUGE}\n```",
    "JSON": '{"file": "class Environment: pass"}',
    "null and half a character": "```python\nclass Environment:\n    x = '\0\ud800'\n    y = (\n```",
}


def test_whatever_is_no_sound_file_is_kept_refused_and_mended_and_nothing_of_it_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    attacks = [source.format(marker=str(marker)) + "class Environment:\n    pass\n" for source in ATTACKS.values()]
    attacks += [(FAMILIES / "environment.py").read_text() + path.read_text() for path in sorted(FAMILIES.glob("*.py"))]
    answers = [*ANSWERS.values(), *map(fenced, attacks)]
    overrides = {"synthesis.repairs": len(answers) - 1, "synthesis.starts": 1, "synthesis.file_tokens": 1000}
    values: list[int] = []

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        if not _doubled(body):  # an answer that was cut off is asked for once more, with room for twice as much
            values.append(nth)
        return answers[len(values) - 1]

    with scripted_server(script, canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server, overrides)
        refusals = look(tmp_path, server, report, overrides, refused_by)
        records = look(tmp_path, server, report, overrides, environments_of)
    assert report["reason"] == f"admit: none of {len(answers)} candidate environments was admitted"
    assert refusals == [["source"]] * len(answers)
    assert not marker.exists()
    sources = dict(zip(ANSWERS, [record.source_code for record in records], strict=False))
    assert "I will not write that." in sources["a refusal"]
    assert NO_FILE in sources["prose"]
    assert "was cut off after 3 tokens" in sources["cut off"]
    assert sources["null and half a character"].count("\ufffd") == 2
    assert (
        max(len(message_text(body, place)) for body in server.requests for place in (2, 3) if len(body["messages"]) > 2)
        < 90_000
    )
    assert server.url not in "".join(sources.values())
    assert (
        len([body for body in server.requests if _doubled(body)]) == 2
    )  # "cut off", and "too large", which never ends
    assert len(server.requests) == len(answers) + 2


def _doubled(body: Mapping[str, Any]) -> bool:
    return 2000 in (body.get("max_tokens"), body.get("max_completion_tokens"))


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"synthesis.max_tokens": 6_000}, "6000 tokens of 6000"),
        ({"synthesis.max_cost": 0.5, "llm.prompt_price": 1e2}, "of 0.5 in money"),
    ],
)
def test_a_budget_that_is_spent_ends_the_capability_and_can_be_raised(
    tmp_path: Path, bound: dict[str, float], words: str
) -> None:
    with scripted_server(Text(NO_FILE, usage=(2_000, 0) if "synthesis.max_tokens" in bound else (1_700, 0))) as server:
        report = run_cycle(tmp_path, server, bound)
        assert f"{words} spent on synthesize of finding-out-first, in 3 replies, which are stored" in report["reason"]
        assert report["reason"].endswith(f"(try: raise {next(iter(bound))})")
        assert len(server.requests) == 3
        raised = {"synthesis.max_tokens": 8_000, "synthesis.max_cost": 0.6, "llm.prompt_price": 1e2}
        look(tmp_path, server, report, raised, lambda context: synthesize(context, NAME, 3))
        assert len(server.requests) == 4
        with pytest.raises(CapabilityError, match="spent on synthesize of finding-out-first"):
            look(tmp_path, server, report, raised, lambda context: synthesize(context, NAME, 4))
        assert len(server.requests) == 4


def test_minutes_of_waiting_are_bounded_too(tmp_path: Path) -> None:
    with scripted_server(NO_FILE) as server:
        report = run_cycle(tmp_path, server, {"synthesis.max_minutes": 1e-9})
    assert "of 6e-08 seconds spent on synthesize" in report["reason"]
    assert report["reason"].endswith("(try: raise synthesis.max_minutes)")
    assert len(server.requests) == 1


TOO_LONG = Status(
    400, message="This model's maximum context length is 8192 tokens.", error_code="context_length_exceeded"
)


def test_a_repair_that_the_server_does_not_take_leads_to_a_fresh_start(tmp_path: Path) -> None:
    overrides = {"synthesis.starts": 2, "synthesis.repairs": 2}
    with scripted_server(lambda body, nth: TOO_LONG if len(body["messages"]) > 2 else f"{NO_FILE} ({nth})") as server:
        report = run_cycle(tmp_path, server, overrides)
        records = look(tmp_path, server, report, overrides, environments_of)
    assert report["reason"] == "admit: none of 6 candidate environments was admitted"
    assert [len(body["messages"]) for body in server.requests] == [2, 4, 4] * 2
    assert ["maximum context length" in record.source_code for record in records] == [False, True, True] * 2
    assert server.url not in "".join(record.source_code for record in records)


@pytest.mark.parametrize("refusal", [TOO_LONG, Status(401), Status(404)], ids=["too long", "key", "model"])
@pytest.mark.parametrize("nth_from", [0, 1], ids=["at first", "then"])
def test_a_server_that_takes_nothing_stops_the_cycle_and_no_attempt_is_used_up(
    tmp_path: Path, refusal: Status, nth_from: int
) -> None:
    refusals = refusal is not TOO_LONG or nth_from == 0
    with scripted_server(lambda body, nth: refusal if nth >= nth_from else NO_FILE) as server:
        cycle = prepared(tmp_path, server.url)
        for attempt in range(nth_from):
            run_with_context(
                cycle, tmp_path, server.url, {}, lambda context, number=attempt: synthesize(context, NAME, number)
            )
        with pytest.raises(ModelRefused) if refusals else nullcontext():
            run_with_context(cycle, tmp_path, server.url, {}, lambda context: synthesize(context, NAME, nth_from))
        assert len(run_with_context(cycle, tmp_path, server.url, {}, environments_of)) == nth_from + (not refusals)


def test_a_budget_in_money_needs_prices(tmp_path: Path) -> None:
    with scripted_server(NO_FILE) as server:
        cycle = prepared(tmp_path, server.url)
        bound = {"synthesis.max_cost": 0.01}
        with pytest.raises(LlmError, match=r"0\.01 is set without prices") as raised:
            run_with_context(cycle, tmp_path, server.url, bound, lambda context: synthesize(context, NAME, 0))
        assert not server.requests
        free = {**bound, "llm.completion_price": 1.0}
        run_with_context(cycle, tmp_path, server.url, free, lambda context: synthesize(context, NAME, 0))
    assert "llm.prompt_price and llm.completion_price" in raised.value.hint


def test_the_cost_of_an_environment_is_that_of_its_capability(tmp_path: Path) -> None:
    with scripted_server(Text(NO_FILE, usage=(1_000, 10))) as server:
        report = run_cycle(tmp_path, server, {"synthesis.starts": 1, "synthesis.repairs": 1})

        def costs(context: Context) -> Any:
            with context.read_session() as session:
                return stage_costs(session, context.cycle_id)

        (cost,) = look(tmp_path, server, report, {"synthesis.starts": 1, "synthesis.repairs": 1}, costs)
    assert (cost.stage, cost.capability, cost.calls, cost.prompt_tokens) == ("synthesize", NAME, 2, 2_000)


def test_an_attempt_that_is_stored_is_not_asked_for_again(tmp_path: Path) -> None:
    with scripted_server(lambda body, nth: f"{NO_FILE} ({nth})") as server:
        cycle = prepared(tmp_path, server.url)
        pair = [
            run_with_context(cycle, tmp_path, server.url, {}, lambda context: synthesize(context, NAME, 0))
            for _ in range(2)
        ]
    assert pair[0] == pair[1]
    assert len(server.requests) == 1


def test_exhausted_starts_are_reported_and_can_be_raised(tmp_path: Path) -> None:
    small_count = {"synthesis.starts": 1, "synthesis.repairs": 0}
    with scripted_server(lambda body, nth: f"{NO_FILE} ({nth})") as server:
        cycle = prepared(tmp_path, server.url, small_count)
        run_with_context(cycle, tmp_path, server.url, small_count, lambda context: synthesize(context, NAME, 0))
        with pytest.raises(CapabilityError, match=r"1 starts.* raise synthesis\.starts"):
            run_with_context(cycle, tmp_path, server.url, small_count, lambda context: synthesize(context, NAME, 1))
        run_with_context(
            cycle,
            tmp_path,
            server.url,
            {**small_count, "synthesis.starts": 2},
            lambda context: synthesize(context, NAME, 1),
        )
    assert len(server.requests) == 2


def test_three_candidates_are_written_at_once_and_the_best_is_mended(tmp_path: Path) -> None:
    together = threading.Barrier(3)
    spoilt = fixture("cloakroom").replace("import random", "import random\nimport os")
    candidates: list[ScriptedReply] = [NO_FILE, fenced(spoilt), fenced("class Environment:\n    pass\n")]

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        if nth < 3:
            together.wait(timeout=60)
            return candidates[nth]
        return NO_FILE

    overrides = {"synthesis.candidates": 3, "synthesis.starts": 1, "synthesis.repairs": 2}
    with scripted_server(script, canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url, overrides)
        run_with_context(cycle, tmp_path, server.url, overrides, lambda context: synthesize(context, NAME, 0))
        assert server.most_at_once == 3
        assert [
            record.seed for record in run_with_context(cycle, tmp_path, server.url, overrides, environments_of)
        ] == [0, 1, 2]
        for attempt in (1, 2):
            run_with_context(
                cycle,
                tmp_path,
                server.url,
                overrides,
                lambda context, number=attempt: synthesize(context, NAME, number),
            )
        assert len(server.requests) == 3


def test_a_repair_continues_from_the_last_file_and_quotes_the_answer_without_one(tmp_path: Path) -> None:
    spoilt = fixture("cloakroom").replace("import random", "import random\nimport os")
    answers: list[ScriptedReply] = [fenced(spoilt), NO_FILE, Refusal("Not again."), NO_FILE]
    overrides = {"synthesis.starts": 1, "synthesis.repairs": 3}
    with scripted_server(lambda body, nth: answers[nth], canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server, overrides)
        records = look(tmp_path, server, report, overrides, environments_of)
    for body, replacement in zip(server.requests[1:], ["", NO_FILE, "Not again."], strict=True):
        assert spoilt.strip() in message_text(body, 2)
        assert ": imports os" in message_text(body)
        assert ("you answered without a file" in message_text(body), replacement in message_text(body)) == (
            bool(replacement),
            True,
        )
    assert [record.repairs for record in records] == [None, *[records[0].hash] * 3]


def test_the_candidate_that_passed_most_is_mended_wherever_it_stands(tmp_path: Path) -> None:
    candidates = [fenced(f"class Environment:\n    number = {number}\n") for number in range(3)]
    overrides = {"synthesis.candidates": 3, "synthesis.repairs": 1}
    with scripted_server(lambda body, nth: candidates[nth] if nth < 3 else NO_FILE, canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url, overrides)
        run_with_context(cycle, tmp_path, server.url, overrides, lambda context: synthesize(context, NAME, 0))

        def judged_items(context: Context) -> EnvironmentRecord:
            records = environments_of(context)
            for record, passed in zip(records, (1, 2, 1), strict=True):
                checks = [
                    Check(name, number < passed, {}, 0.1) for number, name in enumerate(("source", "runs", "oracle"))
                ]
                with context.write_session() as session:
                    save_admission(session, AdmissionReport(record.hash, False, checks), cycle_id=cycle, at=T0)
            return records[1]

        best = run_with_context(cycle, tmp_path, server.url, overrides, judged_items)
        run_with_context(cycle, tmp_path, server.url, overrides, lambda context: synthesize(context, NAME, 3))
        assert best.source_code.strip() in message_text(server.requests[3], 2)
        assert run_with_context(cycle, tmp_path, server.url, overrides, environments_of)[3].repairs == best.hash
