"""Follow the adapter versions that are live or on trial in the store, and split the conversations of a trial.

Invariants: a version that is rolled back gets no new request from the next poll on (``POLL_S``), before it is unloaded.
Its conversations continue with the capability's live version or the base model. The same holds for a version in
quarantine: what its rollback would restore is live in its place, and a trial of it or against it pauses. A version that
was superseded keeps its conversations for ``expiry_s`` seconds, if the engines have slots for it. While the store does
not answer, the last state is used.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session
from store.errors import StoreError
from store.records import AdapterVersion, PromotionEntry, PromotionState, RouterKey
from store.repositories.adapters import cycles_with_adapters, get_adapter, quarantined_adapters
from store.repositories.promotions import (
    last_promotion,
    live_adapters,
    newest_promotions,
    served_base,
    serving_adapters,
    trials,
)
from store.repositories.routers import compositions, fitted_routers, last_fit
from store.repositories.serving import list_keys
from traced.core.errors import TracedError
from traced.core.files import publish_file
from traced.gateway.access import KeyRing
from traced.gateway.adapter_cache import AdapterCache
from traced.gateway.adapter_files import AdapterFiles
from traced.gateway.engines import Pool
from traced.gateway.store_calls import call_store
from traced.inference.client import BASE
from traced.inference.errors import ModelError
from traced.registry.adapter_store import ADAPTERS
from traced.routing.composition import (
    MERGED,
    Choice,
    Composition,
    CompositionError,
    capability_of,
    read_choices,
    serving_composition,
)
from traced.routing.hidden_state import HiddenStateClassifier, find_classifier
from traced.routing.router_files import classifier_file, modification_times
from traced.routing.routers import Route, adapter_capability, adapter_route

POLL_S = 0.2
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveVersions:
    """The adapter versions that are live or on trial, as of one entry of the promotion log.

    Args:
        seq: The sequence number of the log entry.
        routes: The versions that a router chooses among, with their lines in the routing prompt: the live version of
            each capability, or the version on trial if none is live.
        paths: The directories of the versions that are live or on trial.
        superseded: The directories of the versions that only keep their conversations.
        superseded_until: When the first of them has to be dropped; None without one.
        versions: The live version of each capability.
        trials: The trial of each capability.
        classifier: The fitted router; None if none covers all ``routes``, for ``classifier_problem``.
        classifier_files: The files that may hold a fitted router, newest first.
        file_times: The modification times of these files when they were read.
        quarantined: The versions in quarantine, which are nowhere else in this state.
        composition: How the live versions answer together; None: by the router of the settings. ``routes`` has only
            the versions that take part.
    """

    seq: int = -1
    routes: dict[str, Route] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    superseded: dict[str, Path] = field(default_factory=dict)
    superseded_until: datetime | None = None
    versions: dict[str, str] = field(default_factory=dict)
    trials: dict[str, PromotionEntry] = field(default_factory=dict)
    classifier: HiddenStateClassifier | None = None
    classifier_problem: str = ""
    classifier_files: tuple[Path, ...] = ()
    file_times: tuple[int, ...] = ()
    quarantined: frozenset[str] = frozenset()
    composition: Composition | None = None

    def current_model(self, model: str, serves: Callable[[str], bool]) -> str:
        """Return the model that now serves a conversation routed to ``model``.

        This is ``model`` itself while it is live or on trial, or superseded and still served. Else it is its
        capability's live version or the base model.
        """
        if model == BASE or model in self.paths or (model in self.superseded and serves(model)):
            return model
        return self.versions.get(capability_of(model), BASE)

    def assign(self, model: str, conversation_id: str, serves: Callable[[str], bool]) -> tuple[str, int | None]:
        """Return the model for a conversation routed to ``model``, and the log entry of its trial (None without one).

        A trial splits the conversations of its capability between the version on trial and its control. A merged
        version is tried on all conversations, against whatever serves them.
        """
        trial = self.trials.get(MERGED) or self.trials.get(capability_of(model))
        if trial is None:
            return model, None
        control, challenger = self.versions.get(trial.capability, BASE), trial.promotion.adapter
        if trial.capability == MERGED:
            control = model
        # If the challenger cannot be served, the conversation must not count for the trial's control either.
        if not serves(challenger):
            return control, None
        share = trial.promotion.share or 0.0
        return (challenger if _trial_position(challenger, conversation_id) < share else control), trial.seq

    def shadow_version(self, trial_seq: int | None) -> str | None:
        """Return the version that shadows the conversations of a trial, or None if this is no current shadow trial."""
        shadows = (trial for trial in self.trials.values() if trial.promotion.state is PromotionState.SHADOW)
        return next((trial.promotion.adapter for trial in shadows if trial.seq == trial_seq), None)


@dataclass
class PromotionFollower:
    """Keeps ``live``, the API keys and the pool's adapters up to date with the store.

    Args:
        model: The name of the base model; of another one no version is served, see ``served_base``.
        router: ``routing.router``, for versions that no stored composition has.
        check_base: Raises ``ModelError`` for the folder of an adapter of another base model.
        base_digest: Returns the digest of the base model's weights; "" if there are none.
        adapters_root: The data directory of the cycles, if it is mounted elsewhere; None: it is where they wrote it.
        cache: The copies of adapters from an object store; None: without one.
        files: The files of the adapters, which are verified when an engine loads them; None: they are not.
    """

    store: Engine
    pool: Pool
    data_dir: Path
    now: Callable[[], datetime]
    expiry_s: float
    model: str
    router: str
    check_base: Callable[[Path], None] = lambda _: None
    base_digest: Callable[[], str] = lambda: ""
    adapters_root: Path | None = None
    cache: AdapterCache | None = None
    files: AdapterFiles | None = None
    _fitted_at: datetime | None = None
    _copy_error: str = ""
    live: LiveVersions = field(default_factory=LiveVersions)
    keys: KeyRing = field(default_factory=KeyRing)

    async def run(self) -> None:
        """Poll the store until cancelled; while it does not answer, keep the last state."""
        with self.cache.running() if self.cache is not None else contextlib.nullcontext():
            await self._poll()

    async def _poll(self) -> None:
        last_error = ""
        while True:
            try:
                await self.refresh()
                last_error = ""
            except StoreError as error:
                if last_error != str(error):
                    last_error = str(error)
                    log.warning("the store does not answer, the live versions are not updated: %s", last_error)
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Read the store once and apply what has changed; raises ``StoreError``.

        The first call also waits for the download of the live adapters (``adapter_cache.START_S``).
        """
        is_first = self.live.seq < 0
        live = await call_store(self._read, limit_s=None)
        if self.cache is not None and is_first:
            await self.cache.start()
        if live is not None:
            self.live = live
            self.pool.set_adapters(live.paths | live.superseded)
            log.info("live: %s", ", ".join(live.versions.values()) or "the base model alone")
            for trial in live.trials.values():
                share = "" if trial.promotion.share is None else f", {100 * trial.promotion.share:g} %"
                log.info("on trial: %s (%s%s)", trial.promotion.adapter, trial.promotion.state, share)

    def _read(self) -> LiveVersions | None:
        """Return the live versions, or None if nothing has changed."""
        with read_session(self.store) as session:
            self.keys.by_hash = _valid_keys(list_keys(session))
            self._try_copy_fitted_routers(session)
            seq = last_promotion(session)
            quarantined = frozenset(quarantined_adapters(session))
            if seq == self.live.seq and quarantined == self.live.quarantined and not self._is_outdated():
                return None
            model = served_base(session, self.model, partial(self._fits, session))
            live_names = serving_adapters(session, model)
            intact_trials = {
                trial.capability: trial
                for trial in trials(session, model)
                if trial.promotion.adapter not in quarantined
            }
            # Results against a control in quarantine would not count: the trial pauses, and the conversations that the
            # challenger has already stay there.
            live_in_log = [promotion.adapter for promotion in live_adapters(session, model)]
            paused = {capability_of(name) for name in live_in_log if name in quarantined}
            trials_by_capability = {
                capability: trial for capability, trial in intact_trials.items() if capability not in paused
            }
            records = {name: adapter_capability(session, name)[0] for name in live_names}
            versions = {record.capability: name for name, record in records.items()}
            trial_names = [trial.promotion.adapter for trial in intact_trials.values()]
            records |= {name: adapter_capability(session, name)[0] for name in trial_names}
            # In the routing prompt a trial's control represents the capability; conversations routed to it are split
            # between control and challenger afterwards.
            challengers = {
                trial.promotion.adapter
                for capability, trial in intact_trials.items()
                if capability in versions or capability in paused or capability == MERGED
            } - set(live_names)
            composition = serving_composition(self._choices(session, model), live_names, self.router)
            members = records if composition is None else composition.routed
            routes = {name: adapter_route(session, name) for name in members if name not in challengers}
            slots = self.pool.max_adapters - len(records)
            superseded = self._superseded(session, model, {*records, *quarantined}, slots)
            cycles = cycles_with_adapters(session)
        all_records = records | {name: record for name, (record, _) in superseded.items()}
        paths = {name: self._location(record) for name, record in all_records.items()}
        if self.files is not None:
            self.files.versions = {paths[name]: record for name, record in all_records.items()}
        if self.cache is not None:
            self.cache.require({paths[name]: record for name, record in all_records.items()})
        files = tuple(classifier_file(self.data_dir, cycle_id) for cycle_id in cycles) if routes else ()
        # The times are read before the files, so that a file written meanwhile is read again at the next refresh.
        file_times = modification_times(files)
        names = {capability_of(name): name for name in routes}
        classifier, problem = find_classifier(files, names, self.base_digest)
        return LiveVersions(
            seq,
            routes,
            {name: path for name, path in paths.items() if name in records},
            {name: path for name, path in paths.items() if name in superseded},
            min((deadline for _, deadline in superseded.values()), default=None),
            versions,
            trials_by_capability,
            classifier,
            problem,
            files,
            file_times,
            quarantined,
            composition,
        )

    def _choices(self, session: Session, model: str) -> list[Choice]:
        try:
            return read_choices(compositions(session, model))
        except CompositionError as error:
            log.warning("a router chooses among all live versions: %s", error)
            return []

    def _try_copy_fitted_routers(self, session: Session) -> None:
        try:
            self._copy_fitted_routers(session)
            self._copy_error = ""
        except (OSError, TracedError) as error:
            # Rollbacks must be followed with a full disk as well; label tokens decide meanwhile.
            if self._copy_error != str(error):
                self._copy_error = str(error)
                log.warning("a fitted router cannot be copied from the store: %s", error)

    def _copy_fitted_routers(self, session: Session) -> None:
        """Write the classifiers that were fitted on other machines to where those of this machine are."""
        fitted_at = last_fit(session)
        if fitted_at is None or fitted_at == self._fitted_at:
            return
        for cycle_id, document in fitted_routers(session, cycles_with_adapters(session)).items():
            path = classifier_file(self.data_dir, cycle_id)
            if not path.exists() or path.read_text(encoding="utf-8") != document:
                path.parent.mkdir(parents=True, exist_ok=True)
                publish_file(path, document)
        self._fitted_at = fitted_at

    def _is_outdated(self) -> bool:
        deadline = self.live.superseded_until
        has_new_files = modification_times(self.live.classifier_files) != self.live.file_times
        return has_new_files or (deadline is not None and self.now() > deadline)

    def _superseded(
        self, session: Session, model: str, excluded: Container[str], slots: int
    ) -> dict[str, tuple[AdapterVersion, datetime]]:
        """Return the versions superseded last, and when they are dropped; at most ``slots``, none of ``excluded``."""
        promotions = [entry.promotion for entry in newest_promotions(session, model)]
        entries = [
            promotion
            for promotion in promotions
            if promotion.state is PromotionState.SUPERSEDED and promotion.adapter not in excluded
        ]
        ends = {entry.adapter: entry.at + timedelta(seconds=self.expiry_s) for entry in entries}
        recent = sorted((name for name, end in ends.items() if end > self.now()), key=ends.__getitem__, reverse=True)
        return {name: (get_adapter(session, name), ends[name]) for name in recent[: max(slots, 0)]}

    def _fits(self, session: Session, version: str) -> bool:
        try:
            self.check_base(self._location(get_adapter(session, version)))
        except ModelError:
            return False
        return True

    def _location(self, record: AdapterVersion) -> Path:
        """Return where the engines find an adapter."""
        if self.cache is not None:
            return self.cache.location(record)
        return Path(record.path) if self.adapters_root is None else self.adapters_root / ADAPTERS / record.name


def _trial_position(challenger: str, conversation_id: str) -> float:
    """Return a conversation's position in [0, 1) in a trial; it depends on ids only, so that all gateways agree."""
    # The challenger's name is included, so that the next trial splits the conversations differently.
    text = f"{challenger} {conversation_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64


def _valid_keys(keys: list[RouterKey]) -> dict[str, RouterKey] | None:
    return {key.hash: key for key in keys if key.revoked_at is None} if keys else None
