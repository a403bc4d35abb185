"""Routes for serving: models with recent traffic, canaries, the router, its decisions, and one conversation.

A canary is judged as in ``traced.gateway.canaries``, unless more than ``MOST_IN_TRIAL`` conversations take part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import read_session
from store.records import ConversationRoute, PromotionEntry, PromotionState
from store.repositories import promotions
from store.repositories.adapters import cycles_with_adapters, get_adapter
from store.repositories.promotions import live_adapters, served_base
from store.repositories.routers import compositions
from store.repositories.serving import count_trial_conversations
from store.repositories.traffic import Conversation, ModelActivity, RecentTraffic, get_conversation, recent_traffic
from store.repositories.traffic import list_routes as newest_decisions
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
    ServedMessage,
    StepView,
)
from traced.config.cycle_sections import PromotionSection
from traced.gateway.canaries import strata
from traced.gateway.spool_status import read_spool_status
from traced.inference.adapter_base import known_base_digest
from traced.inference.client import BASE
from traced.inference.model_files import base_name
from traced.ingest.losses import describe
from traced.registry.canary import Stratum, evidence, judge
from traced.routing.router_files import describe_router
from traced.scoring.evidence import Labels, is_reserved_author

MOST_IN_TRIAL = 20_000
MAX_RECORDS = 200  # maximum number of exchanges, of feedback and of trajectories of one conversation
TEXT = 2000  # maximum characters of a reason
# Senders of spans choose model names freely, so the number of unknown ones is bounded.
MAX_OTHER_MODELS = 20
ORDER = (PromotionState.LIVE, PromotionState.CANARY, PromotionState.SHADOW)


def model_views(session: Session, traffic: RecentTraffic, settings: PromotionSection, labels: Labels) -> Models:
    """Return the models in the order base, live, on trial, former (newest first), then others with traffic."""
    entries = sorted(promotions.newest_promotions(session), key=_sort_key)
    promoted_names = {entry.promotion.adapter for entry in entries}
    other_names = [name for name in traffic.models if name != BASE and name not in promoted_names]
    other_names.sort(key=lambda name: -traffic.models[name].requests)
    conversations = sum(model.day for model in traffic.models.values())

    def with_traffic(view: ModelView) -> ModelView:
        return _with_traffic(view, traffic.models.get(view.name), conversations, labels)

    views = [with_traffic(ModelView(name=BASE, state="base"))]
    views += [with_traffic(_version(session, entry, settings, labels)) for entry in entries]
    views += [with_traffic(ModelView(name=name, state="other")) for name in other_names[:MAX_OTHER_MODELS]]
    return Models(models=views, by_default=traffic.by_default, partial=traffic.partial)


def decision_view(route: ConversationRoute) -> DecisionView:
    """Return a stored routing decision; infinite log-probabilities become null in JSON."""
    return DecisionView(**vars(replace(route, why=route.why[:TEXT])))


def conversation_view(conversation: Conversation) -> ConversationView:
    """Return a conversation with its newest exchanges, feedback and trajectories, at most ``MAX_RECORDS`` of each."""
    parts = (conversation.exchanges, conversation.feedback, conversation.trajectories)
    became = [
        BecameView(
            id=trajectory.id,
            model=trajectory.model,
            outcome=trajectory.outcome.value,
            reward=trajectory.reward,
            messages=len(trajectory.messages),
            end_cause=trajectory.end_cause.value,
        )
        for trajectory in conversation.trajectories[-MAX_RECORDS:]
    ]
    return ConversationView(
        id=conversation.id,
        decision=None if conversation.route is None else decision_view(conversation.route),
        exchanges=[
            ExchangeView(**{**vars(exchange), "detail": exchange.detail[:TEXT]})
            for exchange in conversation.exchanges[-MAX_RECORDS:]
        ],
        feedback=[
            ServedMessage(**{**vars(remark), "comment": remark.comment[:TEXT]})
            for remark in conversation.feedback[-MAX_RECORDS:]
        ],
        trajectories=became,
        left_out=sum(max(len(part) - MAX_RECORDS, 0) for part in parts),
    )


def _sort_key(entry: PromotionEntry) -> tuple[int, float]:
    state = entry.promotion.state
    return ORDER.index(state) if state in ORDER else len(ORDER), -entry.promotion.at.timestamp()


def _version(session: Session, entry: PromotionEntry, settings: PromotionSection, labels: Labels) -> ModelView:
    promotion = entry.promotion
    in_use = promotion.state in ORDER
    is_canary = promotion.state is PromotionState.CANARY
    return ModelView(
        name=promotion.adapter,
        state=promotion.state.value,
        capability=entry.capability,
        base_model=entry.model,
        since=promotion.at,
        who=promotion.who,
        reason=promotion.reason[:TEXT],
        share=promotion.share,
        quarantine=get_adapter(session, promotion.adapter).quarantine_reason[:TEXT],
        brought_back=(promotions.rollback_target(session, entry) or BASE) if in_use else "",
        canary=_canary(session, entry, settings, labels) if is_canary else None,
    )


def _with_traffic(view: ModelView, activity: ModelActivity | None, conversations: int, labels: Labels) -> ModelView:
    if activity is None:
        return view
    # Only the feedback of people: verdicts of rules and of the judge are counted in the outcomes.
    verdicts = [
        labels.effective_outcome([remark]).outcome for remark in activity.feedback if not is_reserved_author(remark.who)
    ]
    return view.model_copy(
        update={
            "hour": activity.hour,
            "day": activity.day,
            "of_day": activity.day / conversations if conversations else None,
            "shadowed": activity.shadowed,
            "requests": activity.requests,
            "p50_s": activity.latency_quantile(0.50),
            "p99_s": activity.latency_quantile(0.99),
            "failures": activity.failures,
            "liked": verdicts.count(Outcome.SUCCESS),
            "disliked": verdicts.count(Outcome.FAILURE),
            "remarks": verdicts.count(Outcome.UNKNOWN),
            "outcomes": {outcome.value: count for outcome, count in sorted(activity.outcomes.items())},
        }
    )


def _canary(session: Session, entry: PromotionEntry, settings: PromotionSection, labels: Labels) -> CanaryView:
    promotion = entry.promotion
    shares = promotions.canary_shares(session, promotion.adapter)
    conversations = count_trial_conversations(session, shares)
    uncounted = conversations > MOST_IN_TRIAL
    # Reading every conversation of a large trial would take too long for a request.
    if uncounted:
        arms_by_share = [Stratum(share, (), ()) for share in shares.values()]
    else:
        arms_by_share = strata(session, promotion.adapter, labels)
    bounds, decision = evidence(arms_by_share, settings), judge(arms_by_share, settings)
    return CanaryView(
        control=promotion.previous or BASE,
        steps=_steps(arms_by_share, settings),
        needed=settings.min_samples,
        conversations=conversations,
        uncounted=uncounted,
        harm=None if uncounted else bounds.harm,
        fine=None if uncounted else bounds.fine,
        enough=bounds.enough,
        margin=settings.margin,
        verdict="" if uncounted else decision.verdict.value,
        why="" if uncounted else decision.why,
    )


def _steps(arms_by_share: list[Stratum], settings: PromotionSection) -> list[StepView]:
    steps = [
        StepView(
            share=stratum.share,
            state="now" if stratum is arms_by_share[-1] else "done",
            challenger=_arm(stratum.challenger),
            control=_arm(stratum.control),
        )
        for stratum in arms_by_share
    ]
    return steps + [StepView(share=share, state="next") for share in settings.steps if share > arms_by_share[-1].share]


def _arm(outcomes: Sequence[bool]) -> Arm:
    return Arm(judged=len(outcomes), successes=sum(outcomes))


Name = Annotated[str, Query(max_length=2000)]


def router(control: Control) -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/serving")

    @router.get("/models")
    def models() -> Models:
        """The base model and all promoted versions, present and former, with the traffic of the last day."""
        settings = control.settings
        labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
        with read_session(control.store) as session:
            return model_views(session, recent_traffic(session, control.now()), settings.promotion, labels)

    @router.get("/router")
    def health() -> RouterView:
        """The state of the router, the backlog of its spool, and the routing method."""
        settings = control.settings
        has_weights = settings.engine.backend != "openai"
        with read_session(control.store) as session:
            base = served_base(session, base_name(settings))
            live = [promotion.adapter for promotion in live_adapters(session, base)]
            cycles = cycles_with_adapters(session)
            documents = compositions(session, base)
        waiting = read_spool_status(settings.data_dir / "spool")
        return RouterView(
            **dict(router_health(settings.serving)),
            decided_by=describe_router(
                settings.data_dir,
                cycles,
                live,
                by_labels=settings.routing.router == "labels",
                embeddings_url=settings.routing.embeddings_url,
                base_digest=known_base_digest(settings.model.spec, settings.data_dir) if has_weights else "",
                compositions=documents,
            ),
            waiting_files=waiting.files,
            waiting_s=waiting.oldest_s,
            damaged=waiting.damaged,
            losses=describe(waiting.losses),
        )

    @router.get("/decisions")
    def decisions(limit: Limit = 50, before: Name | None = None, model: Name = "") -> DecisionPage:
        """A page of routing decisions, newest first; ``before`` is the cursor of the previous page."""
        with read_session(control.store) as session:
            page = newest_decisions(session, limit=limit, cursor=before, model=model)
        return DecisionPage(decisions=[decision_view(route) for route in page.decisions], next=page.next)

    @router.get("/conversation")
    def conversation(id: Name) -> ConversationView:
        """A conversation, by its own id or by the id of one of its responses."""
        with read_session(control.store) as session:
            return conversation_view(get_conversation(session, id))

    return router
