"""What a cycle's router chooses from: its own promotions, and what was live beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from store.database import write_session
from store.records import Approval, Cycle, CycleState, Decision, Promotion, PromotionState
from store.repositories import adapters, capabilities, cycles, gates, promotions
from store.types import Capability
from tests.unit.pipeline.passed_cycle import passed_cycle
from tests.unit.registry.chain import START, hour
from traced.config.settings import load_settings
from traced.core.errors import PromotionError
from traced.pipeline import evaluate as evaluate_module
from traced.pipeline.context import Context
from traced.pipeline.evaluate import evaluate
from traced.pipeline.mixture import members_and_live
from traced.pipeline.promote import decide, promote, routable_adapters
from traced.targets.registry import target

OWN_ADAPTERS, EARLIER, FOREIGN = "error-recovery@v1", "dates@v1", "tools@v1"


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """Create cycle c1 with a passed adapter; two other adapters are live, one of them on another base model."""
    with passed_cycle(tmp_path) as context:
        with write_session(context.store) as session:
            for name, model, cycle in ((EARLIER, "bundled", "c0"), (FOREIGN, "smollm2", "x0")):
                capability = name.partition("@")[0]
                cycles.save_cycle(session, Cycle(cycle, "desk", model, 0, {}, CycleState.FINISHED, START))
                capabilities.save_capabilities(session, cycle, [Capability(capability, *"tdwel")])
                engine = adapters.get_adapter(session, OWN_ADAPTERS)
                adapters.save_adapter(session, replace(engine, name=name, capability=capability, cycle_id=cycle))
                gates.save_approval(session, Approval(name, Decision.APPROVED, "ann", hour(2)))
                promotions.promote(session, name, actor="ann", at=hour(3))
        yield context


async def test_adapters_live_at_the_promotion_stay_routable(context: Context) -> None:
    assert routable_adapters(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS]  # nothing is known of a promotion yet
    decide(context, OWN_ADAPTERS, True, actor="ann")
    assert await promote(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS]
    assert routable_adapters(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS, EARLIER]
    with write_session(context.store) as session:
        promotions.roll_back(session, EARLIER, actor="ann", at=hour(5))
    assert routable_adapters(context, [OWN_ADAPTERS]) == [
        OWN_ADAPTERS,
        EARLIER,
    ]  # an evaluation that goes on measures the same
    assert await promote(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS]
    assert routable_adapters(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS]


@pytest.mark.parametrize("actor", ["person", "stage"])
async def test_an_adapter_is_uploaded_before_it_takes_traffic(context: Context, tmp_path: Path, actor: str) -> None:
    bucket = tmp_path / "bucket"
    context = replace(context, settings=load_settings(tmp_path, {"serving.adapters_root": f"file://{bucket}"}))

    async def take_traffic() -> None:
        if actor == "person":
            decide(context, OWN_ADAPTERS, True, actor="ann")
        else:
            await promote(context, [OWN_ADAPTERS])

    def live() -> list[str]:
        with context.read_session() as session:
            return [entry.adapter for entry in promotions.live_adapters(session)]

    if actor == "stage":
        with write_session(context.store) as session:
            gates.save_approval(session, Approval(OWN_ADAPTERS, Decision.APPROVED, "ann", hour(4)))
    bucket.touch()  # no folder
    with pytest.raises(PromotionError, match="the object store"):
        await take_traffic()
    assert live() == [EARLIER, FOREIGN]
    bucket.unlink()
    await take_traffic()
    assert live() == [EARLIER, OWN_ADAPTERS, FOREIGN]
    assert [path.parts[-3] for path in bucket.rglob("manifest.json")] == [OWN_ADAPTERS]
    # A stage that is repeated needs no object store for what takes traffic already.
    bucket.rename(tmp_path / "away")
    bucket.touch()
    assert await promote(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS]


async def test_a_cycle_that_promotes_nothing_offers_nothing(context: Context) -> None:
    assert await promote(context, []) == []
    assert routable_adapters(context, []) == []


async def test_what_answers_in_place_of_a_live_version_in_quarantine_takes_part(context: Context) -> None:
    with write_session(context.store) as session:
        second = replace(adapters.get_adapter(session, EARLIER), name="dates@v2", version=2)
        adapters.save_adapter(session, second)
        gates.save_approval(session, Approval(second.name, Decision.APPROVED, "ann", hour(3)))
        promotions.promote(session, second.name, actor="ann", at=hour(4))
        adapters.begin_quarantine(session, second.name, "its files differ", at=hour(4))
    assert members_and_live(context, [OWN_ADAPTERS]) == ([OWN_ADAPTERS, EARLIER], [EARLIER])
    decide(context, OWN_ADAPTERS, True, actor="ann")
    await promote(context, [OWN_ADAPTERS])
    assert routable_adapters(context, [OWN_ADAPTERS]) == [OWN_ADAPTERS, EARLIER]


async def test_the_router_of_the_traffic_covers_the_canaries_of_earlier_cycles(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``traced serve`` uses a classifier only if it covers all versions that a router chooses among."""
    canary, superseding = "refunds@v1", "dates@v2"
    fits: list[list[str]] = []

    async def fit(_: Context, names: Sequence[str], *, publish: bool) -> dict[str, object]:
        assert publish
        fits.append([*names])
        return {"hidden-state": None}

    monkeypatch.setattr(evaluate_module, "routers", fit)
    acme = load_settings(context.data_dir, {"target.name": "acme", "target.kind": "recorded"})
    context = replace(context, settings=acme, target=target(acme), model=replace(context.model, name="bundled"))
    with write_session(context.store) as session:
        capabilities.save_capabilities(session, "c0", [Capability("refunds", *"tdwel")])
        for name in (canary, superseding):
            of_c0 = replace(adapters.get_adapter(session, EARLIER), capability=name.partition("@")[0], name=name)
            adapters.save_adapter(session, replace(of_c0, version=int(name[-1])))
            gates.save_approval(session, Approval(name, Decision.APPROVED, "ann", hour(3)))
            entry = Promotion(name, PromotionState.CANARY, "ann", hour(4), "", share=0.05)
            promotions.put_on_trial(session, entry)
        gates.save_approval(session, Approval(OWN_ADAPTERS, Decision.APPROVED, "ann", hour(5)))
    await evaluate(context, await promote(context, [OWN_ADAPTERS]))
    # The live version stands for a capability of which another one is on trial.
    assert fits == [[OWN_ADAPTERS, EARLIER, canary]]
    assert await promote(context, []) == []
    await evaluate(context, [])
    assert len(fits) == 1
