"""Verdicts that environments try to forge: the host reads plain values within bounds, or answers with a typed error.

What an environment says of itself it may always say (``worker.py``); what is held here is that it says it in the
contract's form, in its turn, and for nobody else.
"""

import asyncio
from collections.abc import Iterator

import pytest

from sandbox.admission.checks import admit, refusals
from sandbox.admission.context import Thresholds
from sandbox.client import SandboxSource
from sandbox.contract import Score
from sandbox.errors import EnvironmentFault, ProtocolFault, SandboxError, WorkerDied
from sandbox.image import Image
from tests.integration.owner import owner
from tests.integration.sandbox.hostile import ATTACKS, LIMITS

pytestmark = pytest.mark.docker
HONEST = Score(0.5, False)


class Forger:
    """A container of the forging environment; replaced where an attack ended it."""

    def __init__(self, runner: asyncio.Runner, source: SandboxSource) -> None:
        self.run = runner.run
        self.source = source

    async def score(self, way: str) -> Score:
        """The score of an episode that scores in this way."""
        episode = self.source.episode()
        await episode.reset(0)
        await episode.step({"role": "assistant", "content": way})
        return await episode.score()

    def scores(self, way: str) -> Score | SandboxError:
        """That score or the error; afterwards an honest episode is scored as ever."""

        async def main() -> Score | SandboxError:
            try:
                scores: Score | SandboxError = await self.score(way)
            except SandboxError as error:
                scores = error
            try:
                assert await self.score("honest") == HONEST
            except (ProtocolFault, WorkerDied):  # what was left of the attack: the container is replaced
                assert await self.score("honest") == HONEST
            return scores

        return self.run(asyncio.wait_for(main(), 60))

    def fresh(self) -> None:
        """The next attack finds a new container."""
        self.run(self.source.close())


@pytest.fixture(scope="module")
def forger(image: Image) -> Iterator[Forger]:
    with asyncio.Runner() as runner:
        source = SandboxSource((ATTACKS / "forgery.py").read_text(), limits=LIMITS, owner=owner("forgery"))
        runner.run(source.__aenter__())
        try:
            yield Forger(runner, source)
        finally:
            runner.run(source.close())


def test_printed_result_lines_are_no_answers(forger: Forger) -> None:
    assert forger.scores("print_result_lines") == Score(0.0, False)


def test_a_reply_out_of_turn_ends_the_container_before_it_counts(forger: Forger) -> None:
    restarts = forger.source.restarts
    error = forger.scores("reply_before_the_question")
    assert isinstance(error, ProtocolFault)
    assert forger.source.restarts == restarts + 1


def test_a_second_reply_is_nobodys(forger: Forger) -> None:
    """The first is the environment's own word; the worker's then ends the container, and no other episode reads it."""
    restarts = forger.source.restarts
    assert forger.scores("reply_twice") in (Score(1.0, True), Score(0.0, False))
    assert forger.source.restarts == restarts + 1


def test_leaving_with_code_0_after_a_fake_score_is_a_death(forger: Forger) -> None:
    restarts = forger.source.restarts
    error = forger.scores("leave_after_a_fake_score")
    assert error == Score(1.0, True) or (isinstance(error, WorkerDied) and error.exit_code == 0)
    assert forger.source.restarts == restarts + 1


def test_a_claimed_time_out_is_distinguished_from_a_real_one(forger: Forger) -> None:
    error = forger.scores("claim_a_time_out")
    assert isinstance(error, EnvironmentFault)
    assert "claimed to have outlived its 20 s" in error.error


def test_the_workers_own_time_out_cannot_be_raised(forger: Forger) -> None:
    error = forger.scores("raise_the_workers_time_out")
    assert isinstance(error, EnvironmentFault)
    assert "rang the worker's own alarm" in error.error


def test_a_fault_cannot_be_attributed_to_the_host(forger: Forger) -> None:
    error = forger.scores("raise_the_workers_bad_request")
    assert isinstance(error, ProtocolFault)  # as any answer that is none: it counts against the environment


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("patch_json", ProtocolFault),
        ("patch_hashlib_and_random", HONEST),
        ("patch_the_worker", EnvironmentFault),
        ("patch_the_workers_lines", (EnvironmentFault, ProtocolFault)),
    ],
)
def test_patched_modules_reach_no_further_than_their_container(
    forger: Forger, way: str, expected: Score | type[SandboxError] | tuple[type[SandboxError], ...]
) -> None:
    async def main() -> Score | SandboxError:
        async with SandboxSource(forger.source.source_code, limits=LIMITS, owner=owner("forgery")) as source:
            container = Forger(asyncio.Runner(), source)
            try:
                await container.score(way)
                return await container.score("honest")
            except SandboxError as error:
                return error

    scores = forger.run(asyncio.wait_for(main(), 60))
    assert scores == expected if isinstance(expected, Score) else isinstance(scores, expected)
    assert forger.scores("honest") == HONEST


def test_an_error_that_cannot_be_read_is_a_fault_with_its_name(forger: Forger) -> None:
    error = forger.scores("raise_the_unspeakable")
    assert isinstance(error, EnvironmentFault)
    assert error.error == r"Nameless: \x1b[2J"


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("a lying float", Score(0.25, False, {"part": 0.5})),
        ("a lying int", Score(0.0, False)),
        ("a thing like a score", Score(0.5, False)),
    ],
)
def test_values_of_subclasses_arrive_as_builtin_types(forger: Forger, way: str, expected: Score) -> None:
    value = forger.scores(way)
    assert isinstance(value, Score)
    assert value == expected
    assert {type(value.reward), *map(type, value.parts.values())} == {float}
    assert type(value.success) is bool


@pytest.mark.parametrize(
    "way",
    [
        *("an impostor of a float", "an impostor of a success", "a lying dict", "nan", "infinity", "a bool"),
        *("a huge int", "an endless int", "a string", "nothing", "a list", "above 1", "below 0"),
        *("success without reward", "success as a number", "success as a string"),
        *("a part above 1", "a part that is nan", "parts that are none"),
    ],
)
def test_a_score_that_is_none_is_the_environments_fault(forger: Forger, way: str) -> None:
    restarts = forger.source.restarts
    assert isinstance(forger.scores(way), EnvironmentFault)
    assert forger.source.restarts == restarts


FORGED_EFFECTS = """
import sys
worker = sys.modules["__main__"].Worker
judged = worker._judged
def forged(self, request, most):
    return ("ok", '{"events": 5, "printed": "none"}') if request["op"] == "effects" else judged(self, request, most)
worker._judged = forged
"""
LEAVES_AFTER_ITS_SCORE = """
import os, sys
def forged(self, request):
    line = b'{"id":%d,"seconds":0,"ok":{"score":{"reward":1,"success":true,"parts":{}}}}' % request["id"]
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, line + bytes([10]))
        except OSError:
            continue
    os._exit(0)
sys.modules["__main__"]._OPERATIONS["score"] = forged
"""


@pytest.mark.parametrize(
    ("forgery", "check", "fault"),
    [(FORGED_EFFECTS, "effects", "EnvironmentFault"), (LEAVES_AFTER_ITS_SCORE, "runs", "WorkerDied")],
    ids=["its effects", "code 0"],
)
async def test_a_forged_worker_is_refused_and_admission_goes_on(
    image: Image, lamp_shop: str, forgery: str, check: str, fault: str
) -> None:
    quick = Thresholds(seeds=4, replica_seeds=2, diversity_seeds=8, distinct_shapes=1)
    admission = admit(
        lamp_shop + forgery,
        target_tools=[],
        target_error_examples=[],
        base_rewards=None,
        thresholds=quick,
        owner=owner("forgery"),
    )
    report = await admission
    assert not report.admitted
    assert refusals(report)[check]["fault"] == fault


def test_a_score_too_deep_to_read_ends_the_container(forger: Forger) -> None:
    assert isinstance(forger.scores("a deep part"), ProtocolFault)
