"""More episodes that somebody asks for, played by the loop."""

import asyncio
from datetime import timedelta
from functools import partial

import pytest

from store.database import read_session
from store.records import CycleState
from store.repositories.events import due_notices
from store.repositories.promotions import read_adapter_state
from store.types import GateAnswer
from tests.integration.service.place import Place
from tests.integration.service.scripted import failed
from tests.integration.service.test_loop import ADA, END_STATES, WAITING
from tests.unit.store.chain import T0
from traced.client.models import Reason
from traced.core.errors import PromotionError
from traced.registry import decisions
from traced.registry.decisions import pending_requests


def request_more_episodes(place: Place, adapter: str) -> str:
    with read_session(place.store) as session:
        tag = read_adapter_state(session, adapter).tag
    decision = partial(decisions.more_episodes, adapter=adapter, rounds=3, tag=tag)
    return place.control.decide(ADA, Reason(reason="too few"), decision).message


async def run_until_answered(place: Place) -> None:
    """Run the loop until no request for episodes is pending and the cycle waits again."""
    draining = asyncio.Event()

    def look() -> None:
        cycle = place.cycle()
        with read_session(place.store) as session:
            if cycle.state is CycleState.WAITING and not pending_requests(session, cycle.id):
                draining.set()

    place.loop.beat = look
    await place.loop.run(draining)


async def test_more_episodes_are_played_and_the_adapter_waits_again_with_the_new_answer(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.run_until(*WAITING)
    assert "runs round 2" in request_more_episodes(place, "alpha@v1")
    place.restart()  # killed before the loop read the request
    await run_until_answered(place)
    assert place.scripted.stage_runs.count("gate alpha") == 2
    assert place.control.status().waiting == ["alpha@v1", "beta@v1"]
    assert "runs round 3" in request_more_episodes(place, "alpha@v1")
    place.scripted.round_answers["alpha@v1"] = GateAnswer.INCONCLUSIVE
    await run_until_answered(place)
    assert place.scripted.stage_runs.count("gate alpha") == 3
    assert place.control.status().waiting == ["beta@v1"]
    with pytest.raises(PromotionError, match="its gate answered inconclusive"):
        place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="alpha@v1"))
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="beta@v1"))
    assert (await place.run_until(*END_STATES)).state is CycleState.FINISHED
    assert [adapter.name for adapter in place.control.adapters() if adapter.live] == ["beta@v1"]
    with read_session(place.store) as session:
        notices = due_notices(session, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
    assert [notice.body["subject"] for notice in notices] == ["alpha@v1", "beta@v1", "alpha@v1"]


async def test_a_look_that_is_quarantined_leaves_the_earlier_answer_to_decide_on(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.run_until(*WAITING)
    place.scripted.ends["gate alpha"] = [failed("builtins.ValueError")] * 3
    request_more_episodes(place, "alpha@v1")
    await run_until_answered(place)
    [quarantined_input] = place.control.quarantined()
    assert (quarantined_input.stage, quarantined_input.capability) == ("gate", "alpha")
    assert place.control.status().waiting == ["alpha@v1", "beta@v1"]
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="alpha@v1"))
