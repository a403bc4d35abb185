"""What a canary was given so far, with what people thought of it, and the requests that failed meanwhile."""

import math
import random
from datetime import datetime, timedelta

from sqlmodel import Session

from store.records import ConversationRoute, Exchange, Feedback
from store.repositories import promotions, serving

CHALLENGER, CONTROL = 0.8, 0.55  # rates of success
STEPS = ((30, 84), (17, 49))  # conversations with the canary and with its control, under each of its shares
LONG_AGO, RECENT = timedelta(hours=8), timedelta(minutes=40)  # when a share's conversations begin


def canary_talks(session: Session, rng: random.Random, at: datetime, live: str, canary: str) -> None:
    """Save conversations for each traffic share of the canary in order of time; the last share is within the hour."""
    shares = list(promotions.canary_shares(session, canary))
    for trial, (canary_count, base_count), ago in zip(shares, STEPS, (LONG_AGO, RECENT), strict=True):
        models = [canary] * canary_count + ["base"] * base_count
        rng.shuffle(models)
        for place, model in enumerate(models):
            moment = at - ago + place * ago / (len(models) + 20)
            odds = {"base": rng.uniform(0.05, 0.6), live: rng.uniform(0.01, 0.3), canary: 1.0}
            options = {option: math.log(share / sum(odds.values())) for option, share in odds.items()}
            key, seconds = f"talk-{trial}-{place:03d}", 0.008 + rng.random() / 100
            _talk(session, rng, ConversationRoute(key, model, options, seconds, "", moment, trial))


def _talk(session: Session, rng: random.Random, route: ConversationRoute) -> None:
    key, at, latency_s = route.id, route.at, rng.lognormvariate(-0.4, 0.5)
    serving.save_routes(session, [route])
    exchanges = [
        Exchange(
            f"e-{key}", key, at + timedelta(seconds=2), route.model, 200, latency_s, 410, 38, response_id=f"r-{key}"
        )
    ]
    if rng.random() < 0.04:
        failed = Exchange(f"f-{key}", key, at, route.model, rng.choice((429, 502)), 0.2, detail="the engine is busy")
        exchanges.insert(0, failed)
    serving.save_exchanges(session, exchanges)
    well = rng.random() < (CONTROL if route.model == "base" else CHALLENGER)
    comment = rng.choice(("", "", "Both parts were done.")) if well else rng.choice(("", "It forgot the second order."))
    feedback = Feedback(key, at + timedelta(minutes=1), score=float(well), comment=comment, who="customer")
    serving.save_feedback(session, feedback)
