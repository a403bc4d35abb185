"""More episodes that somebody asks for, played by the loop."""

import asyncio
from datetime import timedelta
from functools import partial

import pytest

from store.database import read_session
from store.records import CycleState
from store.repositories.events import due_notices
from store.types import GateAnswer
from tests.integration.service.place import Place
from tests.integration.service.scripted import failed
from tests.integration.service.test_loop import ADA, ENDED, WAITING
from tests.unit.store.chain import T0
from traced.client.models import Reason
from traced.core.errors import PromotionError
from traced.registry import decisions
from traced.registry.decisions import pending_requests


def more(place: Place, adapter: str) -> str:
    how = partial(decisions.more_episodes, adapter=adapter, rounds=3)
    return place.control.decide(ADA, Reason(reason="too few"), how).said


async def answered(place: Place) -> None:
    """Run the loop until what was asked for has its answer and the cycle waits again."""
    draining = asyncio.Event()

    def look() -> None:
        cycle = place.cycle()
        with read_session(place.store) as opened:
            if cycle.state is CycleState.WAITING and not pending_requests(opened, cycle.id):
                draining.set()

    place.loop.beat = look
    await place.loop.run(draining)


async def test_more_episodes_are_played_and_the_adapter_waits_again_with_the_new_answer(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.until(*WAITING)
    assert "runs round 2" in more(place, "alpha@v1")
    place.fresh()  # killed before the loop had looked
    await answered(place)
    assert place.scripted.ran.count("gate alpha") == 2
    assert place.control.status().waiting == ["alpha@v1", "beta@v1"]
    assert "runs round 3" in more(place, "alpha@v1")
    place.scripted.looks["alpha@v1"] = GateAnswer.INCONCLUSIVE
    await answered(place)
    assert place.scripted.ran.count("gate alpha") == 3
    assert place.control.status().waiting == ["beta@v1"]
    with pytest.raises(PromotionError, match="its gate answered inconclusive"):
        place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="alpha@v1"))
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="beta@v1"))
    assert (await place.until(*ENDED)).state is CycleState.FINISHED
    assert [one.name for one in place.control.adapters() if one.live] == ["beta@v1"]
    with read_session(place.store) as opened:
        told = due_notices(opened, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
    assert [one.body["subject"] for one in told] == ["alpha@v1", "beta@v1", "alpha@v1"]


async def test_a_look_that_is_parked_leaves_the_earlier_answer_to_decide_on(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.until(*WAITING)
    place.scripted.ends["gate alpha"] = [failed("builtins.ValueError")] * 3
    more(place, "alpha@v1")
    await answered(place)
    [parked] = place.control.parked()
    assert (parked.stage, parked.capability) == ("gate", "alpha")
    assert place.control.status().waiting == ["alpha@v1", "beta@v1"]
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="alpha@v1"))
