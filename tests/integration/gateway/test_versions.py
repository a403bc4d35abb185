"""No request is answered by another adapter than the one it was given to, whatever is loaded and unloaded meanwhile.

The engine has the fault of vLLM's issue 47724 (a load may take the place of an adapter that a running request decodes
with); with a router that lets it hold more adapters than it has places the same test sees wrong answers.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.gateway.place import USER, V1, V2, RunningGateway, running_gateway, until_offered
from tests.integration.gateway.upstream import Slots
from tests.waiting import eventually_async
from traced.inference.start import max_adapters

CLIENTS = 16
TURNS = 12  # promotions and rollbacks


async def traffic(gateway: RunningGateway, stop: asyncio.Event, answers: Counter[str], seed: int) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        model = rng.choice(["auto", V1, V2, "base"])
        answer = await gateway.ask(model, headers={"X-Traced-Conversation": f"c-{rng.randrange(50)}"})
        if answer.status_code != 200:
            assert (answer.status_code, model in (V1, V2)) in ((404, True), (503, True)), answer.text
            answers[f"refused {answer.status_code}"] += 1
            continue
        served_model, text = answer.headers["X-Traced-Model"], answer.json()["choices"][0]["message"]["content"]
        right = served_model in text if served_model != "base" else "@v" not in text
        answers["right" if right else "wrong"] += 1
        answers[served_model] += 1


async def with_promotions(gateway: RunningGateway) -> Counter[str]:
    gateway.engine.slots, gateway.engine.delay_s = Slots(1), 0.06
    answers: Counter[str] = Counter()
    stop = asyncio.Event()
    clients = [asyncio.create_task(traffic(gateway, stop, answers, seed)) for seed in range(CLIENTS)]
    for _ in range(TURNS // 2):
        gateway.promote(V2)
        await until_offered(gateway, V2)
        await asyncio.sleep(0.1)
        gateway.roll_back(V2)
        await until_offered(gateway, V1)
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*clients)
    return answers


@pytest.mark.parametrize("adapters", [1, 2])
async def test_no_answer_comes_from_another_adapter(tmp_path: Path, adapters: int) -> None:
    async with running_gateway(tmp_path, live=V1, settings={"serving.max_adapters": adapters}) as gateway:
        assert (await gateway.ask(V1, USER)).status_code == 200
        answers = await with_promotions(gateway)
    assert answers[V1] > 50, answers
    assert answers[V2] > 50, answers
    if adapters == 1:
        assert answers["wrong"] == 0, answers
    else:
        assert answers["wrong"] > 0, "the engine's fault is not seen any more, so this test proves nothing"


async def test_adapters_of_others_take_none_of_the_routers_places(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1, settings={"serving.max_adapters": 1}) as gateway:
        await until_offered(gateway, V1)
        foreign_names = {"policy-1": "/x", f"{V2}+0123456789ab": "/x"}
        gateway.engine.adapters |= foreign_names
        gateway.promote(V2)  # V1 goes, and V2 is loaded beside two adapters of a training
        await until_offered(gateway, V2)
        assert set(gateway.engine.adapters) == {*foreign_names, V2}


async def test_no_adapter_is_loaded_into_an_engine_whose_slots_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(tmp_path, settings={"serving.max_adapters": 1}) as gateway:
        # The slots of the router's adapter and of all trainings at once.
        gateway.engine.adapters |= {f"policy-{number}": "/x" for number in range(max_adapters(gateway.settings))}
        gateway.promote(V1)
        await eventually_async(lambda: f"is full: {V1} waits" in caplog.text)
        assert gateway.engine.loads == []
        del gateway.engine.adapters["policy-0"]
        await until_offered(gateway, V1)
