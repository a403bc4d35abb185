"""What refuses a model's file before any container: its source, and a world that it does not use."""

from agents.synthesizer.llm.target_block import with_target
from sandbox.admission.report import as_text
from store.types import AdmissionReport
from tests.unit.agents.synthesis.test_target_block import FILE, target
from traced.pipeline.synthesize import TITLE_BYTES, file_bytes, static_checks

NO_WORLD = "class Environment:\n    pass\n"


def results(source: str, *, with_world: bool = True) -> list[tuple[str, bool]]:
    row = target(with_world=with_world)
    checks = static_checks(with_target(source, row), row, has_user_model=False)
    return [(check.name, check.passed) for check in checks]


def test_a_file_that_leaves_the_world_out_is_refused_with_advice() -> None:
    assert results(FILE) == [("source", True), ("world", True)]
    assert results(NO_WORLD) == [("source", True), ("world", False)]
    checks = static_checks(NO_WORLD, target(), has_user_model=False)
    assert "does not use TargetWorld" in as_text(AdmissionReport("hash", False, checks))


def test_without_a_usable_world_a_file_answers_by_itself() -> None:
    assert results(NO_WORLD, with_world=False) == [("source", True)]


def test_a_file_of_the_promised_size_is_accepted_with_all_that_stands_above_it() -> None:
    limit = file_bytes(target())
    assert limit < file_bytes(target(with_world=False))
    for size, fits in ((limit, True), (limit + 2 * TITLE_BYTES, False)):
        assert results(FILE + "#" * (size - len(FILE) - 1) + "\n")[0] == ("source", fits)


def test_a_file_that_does_not_parse_is_refused_by_its_source() -> None:
    assert results("class Environment(") == [("source", False)]
