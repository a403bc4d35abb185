"""A canary at its second share, with conversations that are judged, unjudged, and answered by another model too."""

from sqlmodel import Session

from store.records import ConversationRoute, Exchange, Feedback, Promotion, PromotionState
from store.repositories import adapters, gates, promotions, serving
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.store.chain import T0, adapter, approval, later, save_chain, trajectory

CONTROL, CANARY = "date-reasoning@v1", "date-reasoning@v2"


def save_canary(session: Session) -> None:
    """Save both versions and the canary's conversations."""
    save_versions(session)
    save_trial(session)


def save_versions(session: Session) -> None:
    """Save the live version and an approved one."""
    save_chain(session)
    adapters.save_adapter(session, adapter(2))
    gates.save_approval(session, approval(CANARY))


def save_trial(session: Session) -> None:
    """Save a trial: at its newest share the canary has two judged conversations, its control one."""
    for share in (0.05, 0.25):
        promotions.put_on_trial(session, Promotion(CANARY, PromotionState.CANARY, "Ada", later(20), share=share))
    first, second = promotions.canary_shares(session, CANARY)
    rows: list[tuple[str, int, str, Outcome | None]] = [
        ("early", first, CANARY, Outcome.SUCCESS),
        ("a", second, CANARY, Outcome.FAILURE),
    ]
    rows += [("b", second, CANARY, None), ("c", second, CONTROL, Outcome.SUCCESS), ("d", second, CANARY, None)]
    rows += [("mixed", second, CANARY, Outcome.SUCCESS)]
    for key, trial, model, outcome in rows:
        serving.save_routes(session, [ConversationRoute(key, model, {}, 0.01, "", T0, trial)])
        if outcome is not None:
            save_trajectories(session, [trajectory(f"t-{key}", outcome, model=model)])
        trajectory_id = None if outcome is None else f"t-{key}"
        serving.save_exchanges(session, [Exchange(f"e-{key}", key, T0, model, 200, 0.1, trajectory_id=trajectory_id)])
    serving.save_exchanges(session, [Exchange("other", "mixed", T0, "base", 200, 0.1)])
    for seconds, score in ((1, 0.0), (2, 0.9)):  # the newest score counts
        serving.save_feedback(session, Feedback("b", later(seconds), score=score))
