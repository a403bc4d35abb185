"""The language model that the settings describe, ready to be asked.

Invariants: the key is read here and goes into the endpoint's ``SecretStr``, nowhere else; all who ask the same model on
one event loop (a cycle's capabilities at once) are bound by one concurrency, one pace and one breaker. How it fails:
``LlmError`` says what is not set and the command that shows it. Not covered: whether the server is there
(``traced llm check``), and several data directories that share an account: each has a pace of its own.

What can go wrong before a language model is asked.

    TracedError
    └── LlmError    no model is set, or its key cannot be read

What goes wrong when it is asked is ``agents.errors.ModelError``.

Whether a cycle that will ask a language model has one to ask: told as it begins, and not hours later by a stage.

How it fails: ``LlmError`` names the settings that want a model, what is missing (prices too, where money is bounded),
and what to do. Not covered: whether
the server is there and takes the key (``traced llm check``): it may come up while the cycle collects.

The store as the ledger of a model's replies: what was answered once is never paid for again.

Invariants: a reply is committed before it is used, so a kill loses at most those that are on their way. It is found by
the hash of its request, whichever cycle asked. Fails with the store's errors (``store.errors``).
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import SecretStr
from sqlalchemy import Engine

from agents.llm.budget import Budget
from agents.llm.model import Endpoint, Model
from agents.llm.question import Ledger, Purpose, Question, Reply, Spent
from agents.llm.server import Unlisted, listed
from agents.llm.transport import Line
from store.database import reading, session
from store.records import ModelReply
from store.repositories.llm_replies import find_reply, save_reply, stage_costs
from traced.config.cycle_sections import LlmSection
from traced.config.settings import Settings
from traced.core.errors import TracedError


class LlmError(TracedError):
    """The language model cannot be asked."""


OPENAI = "https://api.openai.com/v1"
NO_KEY = "none"  # what a server of one's own is sent

_LINES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, Line]] = WeakKeyDictionary()


@asynccontextmanager
async def model(settings: Settings, ledger: Ledger, budget: Budget | None = None) -> AsyncIterator[Model]:
    """The model of ``[llm]``, with a connection pool as long as the body runs; raises ``LlmError``."""
    line = _line(endpoint(settings.llm), settings.data_dir)
    check_prices(line.endpoint, budget.cost if budget else 0)
    if not line.endpoint.context_tokens:
        line.endpoint = replace(line.endpoint, context_tokens=await _told_context(line.endpoint))
    async with Model(line.endpoint, ledger, budget=budget, line=line) as made:
        yield made


def _line(described: Endpoint, data_dir: Path) -> Line:
    """The one line that all on this event loop have to an endpoint: they share its slots, its pace and its breaker.

    Its pace is shared by all processes on a data directory.
    """
    lines = _LINES.setdefault(asyncio.get_running_loop(), {})
    if described not in lines:
        account = hashlib.sha256(f"{described.base_url} {described.model}".encode()).hexdigest()[:12]
        data_dir.mkdir(parents=True, exist_ok=True)
        lines[described] = Line(described, pace_file=data_dir / f"llm-pace-{account}.json")
    return lines[described]


def endpoint(section: LlmSection) -> Endpoint:
    """The endpoint that the settings describe; raises ``LlmError``."""
    if not section.model:
        raise LlmError(
            "no language model is set",
            hint='llm.model = "NAME" in traced.toml, llm.base_url where it is served, then: traced llm check',
        )
    key = api_key(section)
    shared = section.model_dump(exclude={"api_key_env", "api_key_file", "base_url"})
    made = Endpoint(base_url=section.base_url or OPENAI, key=SecretStr(key or NO_KEY), **shared)
    for name, value in (("base_url", section.base_url), ("model", section.model)):
        if made.holds_key(value):
            raise LlmError(f"llm.{name} holds the API key", hint=f"write llm.{name} without it, and ask for a new key")
    return made


def check_prices(described: Endpoint, cost: float) -> None:
    """Raise ``LlmError`` where a budget in money could not be held, for nothing has a price."""
    if cost and not described.cost(1, 1):
        raise LlmError(
            f"a budget of {cost:g} in money is set, and no prices: nothing would ever be counted against it",
            hint="llm.prompt_price and llm.completion_price, of a million tokens; max_cost = 0 if it costs nothing",
        )


def api_key(section: LlmSection) -> str:
    """The key, "" where a server of one's own is asked without one; raises ``LlmError``."""
    if section.api_key_file:
        try:
            key = Path(section.api_key_file).expanduser().read_text("utf-8").strip()
        except (OSError, RuntimeError, ValueError) as error:  # no such user's home; no path; no text
            no_text = isinstance(error, UnicodeDecodeError)
            why = "it is no text" if no_text else getattr(error, "strerror", None) or str(error)
            hint = f"ls -l {section.api_key_file}"
            raise LlmError(f"llm.api_key_file {section.api_key_file} cannot be read: {why}", hint=hint) from None
        if not key:
            raise LlmError(f"llm.api_key_file {section.api_key_file} is empty", hint="write the API key into it")
    else:
        key = os.environ.get(section.api_key_env, "").strip() if section.api_key_env else ""
    if not key and not section.base_url:
        raise LlmError(
            f"there is no API key: the environment variable {section.api_key_env or '(none)'} is not set",
            hint="set it, or llm.api_key_file, or llm.base_url for a server of your own; then: traced llm check",
        )
    if not key.isascii() or not key.isprintable():
        raise LlmError("the API key has characters that no key has", hint="look at the variable or file that holds it")
    return key


def key_from(section: LlmSection) -> str:
    """Where the key is kept, in words."""
    return f"from {section.api_key_file}" if section.api_key_file else f"from the variable {section.api_key_env}"


async def _told_context(described: Endpoint) -> int:
    """The context that the server tells of the model; 0 where it tells none."""
    try:
        return (await listed(described)).get(described.model, 0)
    except Unlisted:
        return 0


def wanting(settings: Settings) -> list[str]:
    """The settings of a cycle's stations for which a language model is asked."""
    wanted = {
        "analysis.analyst=llm": settings.analysis.analyst == "llm",
        "synthesis.synthesizer=llm": settings.synthesis.synthesizer == "llm",
        "training.prompt_first=true": settings.training.prompt_first,
    }
    return [setting for setting, wants in wanted.items() if wants]


def check_model(settings: Settings) -> None:
    """Raise ``LlmError`` where the settings want a language model and name none, or its key cannot be read."""
    wanted = wanting(settings)
    if not wanted:
        return
    try:
        described = endpoint(settings.llm)
        check_prices(described, settings.synthesis.max_cost if settings.synthesis.synthesizer == "llm" else 0)
        check_prices(described, settings.prompting.max_cost if settings.training.prompt_first else 0)
    except LlmError as error:
        who = f"{' and '.join(wanted)} {'need' if len(wanted) > 1 else 'needs'} a language model"
        raise LlmError(f"{who}: {error.message}", hint=error.hint) from None


class StoreLedger:
    """``agents.llm.question.Ledger`` over the store; the purpose's cycle has to be there."""

    def __init__(self, store: Engine, now: Callable[[], datetime]) -> None:
        self._store, self._now = store, now

    def find(self, key: str) -> Reply | None:
        """See ``Ledger``."""
        with reading(self._store) as opened:
            found = find_reply(opened, key)
        if found is None:
            return None
        tokens = (found.prompt_tokens, found.completion_tokens)
        return Reply(found.text, found.finish_reason, *tokens, found.cost, found.seconds, found.estimated)

    def keep(self, key: str, question: Question, model: str, reply: Reply) -> None:
        """See ``Ledger``."""
        kept = ModelReply(
            key=key,
            cycle_id=question.purpose.cycle_id,
            stage=question.purpose.stage,
            capability=question.purpose.capability,
            model=model,
            said=[asdict(one) for one in question.said],
            at=self._now(),
            **asdict(reply),
        )
        with session(self._store) as opened:
            save_reply(opened, kept)

    def spent(self, purpose: Purpose) -> Spent:
        """See ``Ledger``."""
        total = Spent()
        with reading(self._store) as opened:
            for one in stage_costs(opened, purpose.cycle_id, stage=purpose.stage):
                if purpose.capability in ("", one.capability):
                    tokens = (one.prompt_tokens, one.completion_tokens)
                    total = total.plus(Spent(one.calls, *tokens, one.cost, one.seconds))
        return total
