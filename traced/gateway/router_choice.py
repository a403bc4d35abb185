"""The choice of the router that decides on a conversation: hidden states, else label tokens, else the base model.

The fitted classifier decides where embeddings exist that equal those it was fitted on: those of the server at
``routing.embeddings_url``, else those of the engine. Without them, or if it fails, label tokens decide. Each decision
says which router made it and why better ones did not; one that no router could make is marked as failed. ``status``
has the same for the state of the moment, for ``/ready``.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sandbox.contract import Message, Task
from traced.gateway.engines import Pool, Replica
from traced.gateway.live_versions import LiveVersions
from traced.inference.client import BASE, EngineClient
from traced.inference.errors import ServingError
from traced.routing.embeddings import EmbeddingIdentity, EmbeddingSource, source_beside
from traced.routing.hidden_state import HiddenStateRouter, refusal
from traced.routing.label_router import LabelRouter
from traced.routing.preflight import EnginePreflight
from traced.routing.routers import BY_LABELS, HIDDEN_STATE, FallbackRouter, Route, Router, RoutingDecision

# The server at ``routing.embeddings_url`` is checked this often (s), and has ``CHECK_S`` to answer.
POLL_S = 2.0
CHECK_S = 5.0
# Seconds that an engine has for the options of a routing prompt, which may be as long as half of its context.
PREPARE_S = 60.0
ONE_MODEL = "one model"  # in the place of a router's name, if a composition has one model answer everything
NO_EMBEDDINGS_HINT = "set routing.embeddings_url to the URL of an embeddings server"
log = logging.getLogger(__name__)


@dataclass
class EmbeddingsServer:
    """The server at ``routing.embeddings_url`` and its state.

    Args:
        model: ``routing.embeddings_model``.
        source: Its embeddings; None while it has none, for ``problem``.
        identity: Their identity.
    """

    client: EngineClient
    model: str
    source: EmbeddingSource | None = None
    identity: EmbeddingIdentity | None = None
    problem: str = "not checked yet"

    async def check(self) -> None:
        """Check the server once."""
        try:
            async with asyncio.timeout(CHECK_S):
                source = await source_beside(self.client, self.model)
                identity = await source.identity()
        except (ServingError, TimeoutError) as error:
            problem = str(error) or f"{self.client.url} does not answer within {CHECK_S:g} s"
            if problem != self.problem:
                log.warning("routing.embeddings_url: %s", problem)
            self.source, self.identity, self.problem = None, None, problem
            return
        if self.problem:
            log.info("routing.embeddings_url: %s of size %d", identity.model, len(identity.probe))
        self.source, self.identity, self.problem = source, identity, ""


@dataclass
class RouterChoice:
    """Chooses the router for each conversation by what the engines offer.

    Args:
        timeout_s: Seconds that a decision may take.
        use_label_tokens: Whether to route by label tokens even if a fitted classifier exists.
        server: The server at ``routing.embeddings_url``, if it is set.
    """

    pool: Pool
    live: Callable[[], LiveVersions]
    timeout_s: float
    use_label_tokens: bool
    server: EmbeddingsServer | None = None
    _label_routers: dict[str, tuple[EnginePreflight, LabelRouter]] = field(default_factory=dict)
    _status_text: str = ""
    _failures: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        """Follow the state of servers and engines until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Check the embeddings server, prepare label tokens, and log which router decides if that has changed."""
        # Again and again, because another server may answer at its URL.
        if self.server is not None:
            await self.server.check()
        self._log_changes()
        urls = {replica.url for replica in self.pool.replicas}
        self._label_routers = {url: entry for url, entry in self._label_routers.items() if url in urls}
        await asyncio.gather(*(self._prepare(replica) for replica in self.pool.replicas if replica.serves(BASE)))

    async def close(self) -> None:
        """Close the connections to the embeddings server."""
        if self.server is not None:
            await self.server.client.aclose()

    async def choose(self, conversation_id: str, messages: Sequence[Message], live: LiveVersions) -> RoutingDecision:
        """Choose the model by these messages of a conversation; never raises a ``ServingError``."""
        composition = live.composition
        if composition is not None and not composition.router:
            if not self.pool.serves(composition.model):
                return RoutingDecision(BASE, {}, 0.0, f"no engine has loaded {composition.model}", failed=True)
            return RoutingDecision(composition.model, {}, 0.0, router=ONE_MODEL)
        replica = self.pool.pick(BASE, conversation_id)
        if replica is None:
            return RoutingDecision(BASE, {}, 0.0, "no engine answers", failed=True)
        router = self._router(replica, live)
        decision = await router.choose(Task("", [dict(message) for message in messages], []))
        failures = {name: text for name, text in decision.fallbacks.items() if name not in router.excluded}
        if failures and failures != self._failures:
            log.warning("routing fell back to %s: %s", decision.router or BASE, failures)
        self._failures = failures
        default = composition.default if composition is not None else ""
        # A classifier may have classes of versions that are not live any more.
        if default and decision.model not in live.routes and self.pool.serves(default):
            return replace(decision, model=default)
        return decision

    def status(self) -> dict[str, object]:
        """Return which router decides at each engine, and why better ones do not; {} if no adapter is live."""
        live = self.live()
        if not live.routes:
            return {}
        if live.composition is not None and not live.composition.router:
            return {replica.url: {"router": ONE_MODEL} for replica in self.pool.replicas if replica.serves(BASE)}
        status: dict[str, object] = {}
        for replica in self.pool.replicas:
            if replica.serves(BASE):
                router = self._router(replica, live)
                status[replica.url] = {"router": router.name or BASE} | (
                    {"excluded": dict(router.excluded)} if router.excluded else {}
                )
        return status

    def _router(self, replica: Replica, live: LiveVersions) -> FallbackRouter:
        routers: list[Router] = []
        excluded: dict[str, str] = {}
        composition = live.composition
        use_label_tokens = self.use_label_tokens if composition is None else composition.router == BY_LABELS
        candidates = [] if use_label_tokens else [(HIDDEN_STATE, self._hidden_state(replica, live))]
        routes = self._routes(live)
        if not routes:
            reason = "no engine has loaded a live adapter"
            return FallbackRouter([], {name: reason for name, _ in candidates} | {BY_LABELS: reason})
        for name, router in [*candidates, (BY_LABELS, self._labels(replica, routes))]:
            if isinstance(router, str):
                excluded[name] = router
            else:
                routers.append(router)
        return FallbackRouter(routers, excluded, self.timeout_s)

    def _hidden_state(self, replica: Replica, live: LiveVersions) -> HiddenStateRouter | str:
        """Return the router by hidden states, or why there is none."""
        if live.classifier is None:
            return live.classifier_problem
        if self.server is not None:
            source, identity, problem = self.server.source, self.server.identity, self.server.problem
        elif replica.preflight is not None:
            source, identity = EmbeddingSource(replica.client), replica.preflight.embeddings
            problem = f"{replica.preflight.embeddings_problem}; {NO_EMBEDDINGS_HINT}"
        else:
            return f"{replica.url} was not checked yet"
        if source is None or identity is None:
            return problem
        mismatch = refusal(live.classifier, identity)
        return f"the classifier was {mismatch}" if mismatch else HiddenStateRouter(source, live.classifier)

    def _labels(self, replica: Replica, routes: Sequence[Route]) -> LabelRouter | str:
        """Return the router by label tokens, or why there is none; it is kept, because it has prepared its prompts."""
        preflight = replica.preflight
        if preflight is None:
            return f"{replica.url} was not checked yet"
        if preflight.label_problem:
            return preflight.label_problem
        checked_preflight, router = self._label_routers.get(replica.url, (None, None))
        if router is None or checked_preflight is not preflight or router.adapters != tuple(routes):
            router = LabelRouter(replica.client, tuple(routes), preflight.context)
            self._label_routers[replica.url] = (preflight, router)
        return router

    async def _prepare(self, replica: Replica) -> None:
        """Have the engine compute the options of the routing prompt, so that no conversation waits for that."""
        live = self.live()
        router = self._labels(replica, self._routes(live))
        if live.routes and isinstance(router, LabelRouter) and not router.prepared:
            try:
                async with asyncio.timeout(PREPARE_S):
                    await router.prepare()
            except (ServingError, TimeoutError) as error:
                log.warning("label tokens at %s could not be prepared: %s", replica.url, error or "no answer in time")

    def _routes(self, live: LiveVersions) -> list[Route]:
        return [route for name, route in live.routes.items() if self.pool.serves(name)]

    def _log_changes(self) -> None:
        text = "; ".join(f"{url}: {state}" for url, state in self.status().items())
        if text and text != self._status_text:
            log.info("routing: %s", text)
        self._status_text = text or self._status_text
