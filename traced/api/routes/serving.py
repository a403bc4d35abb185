"""What is served: models and their traffic of late, the router, its decisions, one conversation.

Serving as the control API shows it: models with their traffic of late, canaries, decisions, conversations.

Invariants: nothing here writes; every function takes one session, so that what it shows is of one moment. A canary is
judged as ``traced.gateway.canaries`` does, and not at all where more than ``MOST_IN_TRIAL`` conversations take
part. Who said something of a model is a person; rules and the judge count among the outcomes.
"""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import reading
from store.records import ConversationRoute, PromotionState, Trial
from store.repositories import promotions
from store.repositories.adapters import fitting_cycles
from store.repositories.promotions import live_adapters
from store.repositories.serving import count_taking_part
from store.repositories.traffic import Conversation, Lately, ModelLately, get_conversation, lately
from store.repositories.traffic import decisions as newest_decisions
from store.types import Outcome
from traced.api.control import Control
from traced.api.queries import Limit, router_health
from traced.client.serving import (
    Arm,
    BecameView,
    CanaryView,
    ConversationView,
    DecisionPage,
    DecisionView,
    ExchangeView,
    Models,
    ModelView,
    RouterView,
    SaidView,
    StepView,
)
from traced.config.cycle_sections import PromotionSection
from traced.evaluation import sequential
from traced.gateway.canaries import strata
from traced.gateway.spool_status import spooled
from traced.inference.client import BASE
from traced.registry.canary import Stratum, evidence, judge
from traced.routing.router_files import decided_by
from traced.scoring.evidence import Labels, is_reserved

MOST_IN_TRIAL = 20_000
SHOWN = 200  # exchanges, remarks and trajectories of one conversation
TEXT = 2000  # characters of a reason
OTHERS = 20  # models that no promotion knows; senders of spans name them as they like
ORDER = (PromotionState.LIVE, PromotionState.CANARY, PromotionState.SHADOW)


def model_views(session: Session, of_late: Lately, settings: PromotionSection, labels: Labels) -> Models:
    """Base, then what is live, then what is on trial, then what was, the newest first, then whoever else answered."""
    entries = sorted(promotions.newest_entries(session), key=_place)
    known = {one.promotion.adapter for one in entries}
    others = [name for name in of_late.models if name != BASE and name not in known]
    others.sort(key=lambda name: -of_late.models[name].requests)
    conversations = sum(model.day for model in of_late.models.values())

    def seen(view: ModelView) -> ModelView:
        return _with_traffic(view, of_late.models.get(view.name), conversations, labels)

    shown = [seen(ModelView(name=BASE, state="base"))]
    shown += [seen(_version(session, one, settings, labels)) for one in entries]
    shown += [seen(ModelView(name=name, state="other")) for name in others[:OTHERS]]
    return Models(models=shown, by_default=of_late.by_default, partial=of_late.partial)


def decision_view(route: ConversationRoute) -> DecisionView:
    """As it is stored; log-probs that were infinite are None."""
    return DecisionView(**vars(replace(route, why=route.why[:TEXT])))


def conversation_view(found: Conversation) -> ConversationView:
    """Its newest parts."""
    everything = (found.exchanges, found.feedback, found.trajectories)
    became = [
        BecameView(
            id=one.id,
            model=one.model,
            outcome=one.outcome.value,
            reward=one.reward,
            messages=len(one.messages),
            end_cause=one.end_cause.value,
        )
        for one in found.trajectories[-SHOWN:]
    ]
    return ConversationView(
        id=found.id,
        decision=None if found.route is None else decision_view(found.route),
        exchanges=[ExchangeView(**{**vars(one), "detail": one.detail[:TEXT]}) for one in found.exchanges[-SHOWN:]],
        feedback=[SaidView(**{**vars(one), "comment": one.comment[:TEXT]}) for one in found.feedback[-SHOWN:]],
        trajectories=became,
        left_out=sum(max(len(part) - SHOWN, 0) for part in everything),
    )


def _place(standing: Trial) -> tuple[int, float]:
    state = standing.promotion.state
    return ORDER.index(state) if state in ORDER else len(ORDER), -standing.promotion.at.timestamp()


def _version(session: Session, standing: Trial, settings: PromotionSection, labels: Labels) -> ModelView:
    entry = standing.promotion
    stands = entry.state in ORDER
    is_canary = entry.state is PromotionState.CANARY
    return ModelView(
        name=entry.adapter,
        state=entry.state.value,
        capability=standing.capability,
        since=entry.at,
        who=entry.who,
        reason=entry.reason[:TEXT],
        share=entry.share,
        brought_back=(promotions.brought_back(session, standing) or BASE) if stands else "",
        canary=_canary(session, standing, settings, labels) if is_canary else None,
    )


def _with_traffic(view: ModelView, lately: ModelLately | None, conversations: int, labels: Labels) -> ModelView:
    if lately is None:
        return view
    said = [labels.standing([one]).outcome for one in lately.feedback if not is_reserved(one.who)]
    return view.model_copy(
        update={
            "hour": lately.hour,
            "day": lately.day,
            "of_day": lately.day / conversations if conversations else None,
            "shadowed": lately.shadowed,
            "requests": lately.requests,
            "p50_s": lately.within(0.50),
            "p99_s": lately.within(0.99),
            "failures": lately.failures,
            "liked": said.count(Outcome.SUCCESS),
            "disliked": said.count(Outcome.FAILURE),
            "remarks": said.count(Outcome.UNKNOWN),
            "outcomes": {outcome.value: count for outcome, count in sorted(lately.outcomes.items())},
        }
    )


def _canary(session: Session, standing: Trial, settings: PromotionSection, labels: Labels) -> CanaryView:
    entry = standing.promotion
    shares = promotions.shares(session, entry.adapter)
    conversations = count_taking_part(session, shares)
    uncounted = conversations > MOST_IN_TRIAL
    if uncounted:
        counted = [Stratum(share, sequential.Arm(0, 0), sequential.Arm(0, 0)) for share in shares.values()]
    else:
        counted = strata(session, entry.adapter, labels)
    known, found = evidence(counted, settings), judge(counted, settings)
    return CanaryView(
        control=entry.previous or BASE,
        steps=_steps(counted, settings),
        needed=settings.min_samples,
        conversations=conversations,
        uncounted=uncounted,
        harm=None if uncounted else known.harm,
        fine=None if uncounted else known.fine,
        enough=known.enough,
        margin=settings.margin,
        verdict="" if uncounted else found.verdict.value,
        why="" if uncounted else found.why,
    )


def _steps(counted: list[Stratum], settings: PromotionSection) -> list[StepView]:
    steps = [
        StepView(
            share=one.share,
            state="now" if one is counted[-1] else "done",
            challenger=Arm(judged=one.challenger.n, successes=one.challenger.successes),
            control=Arm(judged=one.control.n, successes=one.control.successes),
        )
        for one in counted
    ]
    return steps + [StepView(share=share, state="next") for share in settings.steps if share > counted[-1].share]


Name = Annotated[str, Query(max_length=2000)]


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter(prefix="/serving")

    @router.get("/models")
    def models() -> Models:
        """Base and every version that is or was promoted, with the last day's traffic."""
        settings = control.settings
        labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
        with reading(control.store) as opened:
            return model_views(opened, lately(opened, control.now()), settings.promotion, labels)

    @router.get("/router")
    def health() -> RouterView:
        """What the router says of itself, what waits in the spool, and who decides."""
        settings = control.settings
        with reading(control.store) as opened:
            live = [one.adapter for one in live_adapters(opened)]
            cycles = fitting_cycles(opened)
        waiting = spooled(settings.data_dir / "spool")
        return RouterView(
            **dict(router_health(settings.serving)),
            decided_by=decided_by(settings.data_dir, cycles, live, by_labels=settings.routing.router == "labels"),
            waiting_files=waiting.files,
            waiting_s=waiting.oldest_s,
            damaged=waiting.damaged,
        )

    @router.get("/decisions")
    def decisions(limit: Limit = 50, before: Name | None = None, model: Name = "") -> DecisionPage:
        """The newest decisions behind the cursor ``before`` of the page before."""
        with reading(control.store) as opened:
            page = newest_decisions(opened, limit=limit, before=before, model=model)
        return DecisionPage(decisions=[decision_view(one) for one in page.decisions], next=page.next)

    @router.get("/conversation")
    def conversation(id: Name) -> ConversationView:
        """The conversation of this id, or in which an answer of this id was given."""
        with reading(control.store) as opened:
            return conversation_view(get_conversation(opened, id))

    return router
