"""What is live, as the router sees it: the promotions in the store, followed while requests are in flight.

Invariants: what is rolled back takes no new request from the next look on (``LOOK_S``), before anything is unloaded;
what is promoted takes requests at an engine when that engine has confirmed it (``engines``). A conversation that was
given a version which is live no more goes on with its capability's live version, or with the base model. Which of a
capability's conversations a canary gets depends on their ids alone, so that every router says the same. The router that
a cycle fits after its promotions decides from the next look on; until then, and where none knows all that is offered,
the label tokens do (``traced.serving.fitted``).
How it fails: while the store does not answer the router goes on with what it knew. Not covered: who may promote.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Engine

from store.database import reading
from store.errors import StoreError
from store.records import PromotionState, Trial
from store.repositories.adapters import fitting_cycles
from store.repositories.promotions import last_promotion, live_adapters, trials
from store.repositories.serving import list_keys
from store.serving_records import RouterKey
from traced.serving.client import BASE
from traced.serving.errors import RouterFileError
from traced.serving.fitted import capability_of, classifier_file, stamp, unknown
from traced.serving.gateway.engines import Pool
from traced.serving.gateway.keys import Keys
from traced.serving.hidden_state_router import HiddenStateClassifier, read_classifier
from traced.serving.router import Route
from traced.serving.routes import described, route

LOOK_S = 0.2
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Live:
    """What is live and what is on trial; ``seq`` is the log entry that it is as of.

    ``routes`` are the versions that a decision chooses among, with their lines in the routing prompt: of each
    capability the live one, or the one on trial where none is live. ``paths`` are all that engines should have.
    """

    seq: int = -1
    routes: dict[str, Route] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # capability to its live version
    trials: dict[str, Trial] = field(default_factory=dict)  # by capability
    classifier: HiddenStateClassifier | None = None
    fitted: tuple[Path, ...] = ()  # where routers of the live adapters may lie, the newest first
    stamp: tuple[int, ...] = ()  # of these files, as they were read

    def now(self, model: str) -> str:
        """What a conversation that was given ``model`` goes on with."""
        if model == BASE or model in self.paths:
            return model
        return self.versions.get(capability_of(model), BASE)

    def assigned(self, chosen: str, conversation_id: str, serves: Callable[[str], bool]) -> tuple[str, int | None]:
        """Who gets a conversation for which a decision named ``chosen``, and the trial that it takes part in."""
        trial = self.trials.get(capability_of(chosen))
        if trial is None:
            return chosen, None
        standing, challenger = self.versions.get(trial.capability, BASE), trial.promotion.adapter
        if not serves(challenger):
            return standing, None  # one that cannot have the challenger is no control either
        share = trial.promotion.share or 0.0  # a shadow has none
        return (challenger if _place(challenger, conversation_id) < share else standing), trial.seq

    def shadow(self, trial: int | None) -> str | None:
        """The version that answers in the shadow of a conversation of this trial, if it still does."""
        shadows = (one for one in self.trials.values() if one.promotion.state is PromotionState.SHADOW)
        return next((one.promotion.adapter for one in shadows if one.seq == trial), None)


@dataclass
class Follower:
    """Keeps ``live`` and the pool's wish to what the store says."""

    store: Engine
    pool: Pool
    data_dir: Path
    live: Live = field(default_factory=Live)
    keys: Keys = field(default_factory=Keys)

    async def keep(self) -> None:
        """Follow the store until cancelled."""
        told = ""
        while True:
            try:
                await self.look()
                told = ""
            except StoreError as error:
                if told != str(error):
                    told = str(error)
                    log.warning("the router goes on with what was live: %s", told)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once; raises ``StoreError``, and then nobody knows who may ask: a router does not begin so."""
        found = await asyncio.to_thread(self._read)
        if found is not None:
            self.live = found
            self.pool.want(found.paths)
            by = "a fitted router" if found.classifier is not None else "label tokens"
            log.info("live: %s; decided by %s", ", ".join(found.versions.values()) or "the base model alone", by)
            for one in found.trials.values():
                share = "" if one.promotion.share is None else f", {100 * one.promotion.share:g} %"
                log.info("on trial: %s (%s%s)", one.promotion.adapter, one.promotion.state, share)

    def _read(self) -> Live | None:
        with reading(self.store) as opened:
            self.keys.known = _keys(list_keys(opened))
            seq = last_promotion(opened)
            if seq == self.live.seq and stamp(self.live.fitted) == self.live.stamp:
                return None
            on_trial = {one.capability: one for one in trials(opened)}
            told = {one.adapter: described(opened, one.adapter)[0] for one in live_adapters(opened)}
            versions = {version.capability: name for name, version in told.items()}
            told |= {one.promotion.adapter: described(opened, one.promotion.adapter)[0] for one in on_trial.values()}
            challengers = {one.promotion.adapter for name, one in on_trial.items() if name in versions}
            routes = {name: route(opened, name) for name in told if name not in challengers}
            cycles = fitting_cycles(opened)
        paths = {name: Path(version.path) for name, version in told.items()}
        fitted = tuple(classifier_file(self.data_dir, cycle_id) for cycle_id in cycles) if routes else ()
        read = stamp(fitted)  # before they are read: what is written meanwhile is read at the next look
        classifier = _classifier(fitted, {capability_of(name): name for name in routes})
        return Live(seq, routes, paths, versions, on_trial, classifier, fitted, read)


def _place(challenger: str, conversation_id: str) -> float:
    """A conversation's place in [0, 1) among those of a trial; another challenger deals anew."""
    told = f"{challenger} {conversation_id}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest()) / 2**64


def _keys(keys: list[RouterKey]) -> dict[str, RouterKey] | None:
    return {key.hash: key for key in keys if key.revoked_at is None} if keys else None


def _classifier(fitted: Sequence[Path], versions: Mapping[str, str]) -> HiddenStateClassifier | None:
    """The newest fitted router that knows every capability offered, its classes named by the versions offered."""
    for path in fitted:
        try:
            found = read_classifier(path)
        except RouterFileError:
            continue
        if not unknown(found.examples, versions.values()):  # what is offered no more is the base model (Live.now)
            return replace(found, classes=[versions.get(capability_of(model), model) for model in found.classes])
    return None
