"""Open the configured language model: its endpoint and key, early checks of the settings, and a ledger in the store.

The key is read here and goes into the endpoint's ``SecretStr``, nowhere else. All users of a model on one event loop
share one concurrency limit, rate limit and breaker. A reply is committed before it is used and found again by the hash
of its request, so no request is paid for twice. ``LlmError`` states the missing setting and the command that shows it.
Not covered: several data directories that share an account.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import SecretStr
from sqlalchemy import Engine

from agents.llm.budget import Budget
from agents.llm.model import Endpoint, Model
from agents.llm.question import Ledger, Purpose, Question, Reply, Usage
from agents.llm.server import ModelListUnavailable, context_lengths
from agents.llm.transport import Transport
from store.database import read_session, write_session
from store.records import ModelReply
from store.repositories.llm_replies import find_reply, save_reply, stage_costs
from traced.config.cycle_sections import LlmSection, ModelSection
from traced.config.settings import Settings
from traced.core.errors import TracedError


class LlmError(TracedError):
    """The language model cannot be used as configured."""


OPENAI = "https://api.openai.com/v1"
LLM, USER, JUDGE = "llm", "target.user", "outcomes.judge"  # the sections that name a model
CHECKS = {LLM: "traced llm check", USER: "traced llm check --user", JUDGE: "traced outcomes agreement"}
NO_KEY = "none"  # sent to a server that needs no key; the client library rejects an empty one

_LINES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, Transport]] = WeakKeyDictionary()


@asynccontextmanager
async def model(
    settings: Settings, ledger: Ledger, budget: Budget | None = None, *, user: bool = False
) -> AsyncIterator[Model]:
    """Open the model of ``[llm]``, or with ``user`` of ``[target.user]``, with a connection pool for the body.

    Raises:
        LlmError: The section is incomplete, or its key cannot be read.
    """
    model_endpoint = endpoint(settings.target.user, USER) if user else endpoint(settings.llm)
    async with open_model(model_endpoint, settings.data_dir, ledger, budget) as language_model:
        yield language_model


@asynccontextmanager
async def open_model(
    model_endpoint: Endpoint, data_dir: Path, ledger: Ledger, budget: Budget | None = None
) -> AsyncIterator[Model]:
    """Open the model of an endpoint, with a connection pool for the body; raises ``LlmError``."""
    line = _line(model_endpoint, data_dir)
    check_prices(line.endpoint, budget.cost if budget else 0)
    # The context length must be known before the first question is shortened to fit it.
    if not line.endpoint.context_tokens:
        line.endpoint = replace(line.endpoint, context_tokens=await _server_context(line.endpoint))
    async with Model(line.endpoint, ledger, budget=budget, transport=line) as language_model:
        yield language_model


def _line(model_endpoint: Endpoint, data_dir: Path) -> Transport:
    """Return the transport to an endpoint that all users on this event loop share, with its limits and its breaker."""
    lines = _LINES.setdefault(asyncio.get_running_loop(), {})
    if model_endpoint not in lines:
        account = hashlib.sha256(f"{model_endpoint.base_url} {model_endpoint.model}".encode()).hexdigest()[:12]
        data_dir.mkdir(parents=True, exist_ok=True)
        # The rate limit is kept in a file, because all processes on a data directory share the account.
        lines[model_endpoint] = Transport(model_endpoint, rate_limit_file=data_dir / f"llm-pace-{account}.json")
    return lines[model_endpoint]


def endpoint(section: LlmSection, table: str = LLM) -> Endpoint:
    """Return the endpoint of a section of the settings, whose name is ``table``; raises ``LlmError``."""
    if not section.model:
        raise LlmError(
            f"the setting {table}.model is empty",
            hint=f'set {table}.model = "NAME" in traced.toml, {table}.base_url for your own server, '
            f"then: {CHECKS[table]}",
        )
    key = api_key(section, table)
    shared = section.model_dump(include={field.name for field in fields(Endpoint)} - {"base_url"})
    described_endpoint = Endpoint(
        base_url=section.base_url or OPENAI, key=SecretStr(key or NO_KEY), section=table, **shared
    )
    for name, value in (("base_url", section.base_url), ("model", section.model)):
        if described_endpoint.contains_key(value):
            raise LlmError(
                f"{table}.{name} holds the API key",
                hint=f"remove it from {table}.{name}, and create a new key at the provider",
            )
    return described_endpoint


def check_prices(model_endpoint: Endpoint, cost: float) -> None:
    """Raise ``LlmError`` if a budget in money is set but no price."""
    if cost and not model_endpoint.cost(1, 1):
        raise LlmError(
            f"a cost budget of {cost:g} is set without prices, so it would have no effect",
            hint="set llm.prompt_price and llm.completion_price (per million tokens), or max_cost = 0 for a free model",
        )


def api_key(section: ModelSection, table: str = LLM) -> str:
    """Return the key, "" if the endpoint needs none; raises ``LlmError``."""
    if section.api_key_file:
        try:
            key = Path(section.api_key_file).expanduser().read_text("utf-8").strip()
        # RuntimeError: the home of an unknown user; ValueError: an invalid path or text.
        except (OSError, RuntimeError, ValueError) as error:
            no_text = isinstance(error, UnicodeDecodeError)
            reason = "it is not UTF-8 text" if no_text else getattr(error, "strerror", None) or str(error)
            hint = f"ls -l {section.api_key_file}"
            raise LlmError(f"{table}.api_key_file {section.api_key_file} cannot be read: {reason}", hint=hint) from None
        if not key:
            raise LlmError(f"{table}.api_key_file {section.api_key_file} is empty", hint="write the API key into it")
    else:
        key = os.environ.get(section.api_key_env, "").strip() if section.api_key_env else ""
    if not key and not section.base_url:
        raise LlmError(
            f"there is no API key: the environment variable {section.api_key_env or '(none)'} is not set",
            hint=f"set the variable, {table}.api_key_file, or {table}.base_url for your own server; "
            f"then: {CHECKS[table]}",
        )
    if not key.isascii() or not key.isprintable():
        raise LlmError("the API key has invalid characters", hint="check the variable or file that holds it")
    return key


def key_from(section: ModelSection) -> str:
    """Describe where the key is kept."""
    return f"from {section.api_key_file}" if section.api_key_file else f"from the variable {section.api_key_env}"


async def _server_context(model_endpoint: Endpoint) -> int:
    """Return the context length that the server states for the model; 0 if it states none."""
    try:
        return (await context_lengths(model_endpoint)).get(model_endpoint.model, 0)
    except ModelListUnavailable:
        return 0


def settings_needing_model(settings: Settings) -> list[str]:
    """Return the settings of a cycle that need a language model."""
    required_by = {
        "analysis.analyst=llm": settings.analysis.analyst == "llm",
        "synthesis.synthesizer=llm": settings.synthesis.synthesizer == "llm",
        "training.prompt_first=true": settings.training.prompt_first,
    }
    return [setting for setting, required in required_by.items() if required]


def check_model(settings: Settings) -> None:
    """Raise ``LlmError`` if the settings need a language model that is not configured completely.

    The user's model is checked if the settings name one.
    """
    if settings.target.user.model:
        endpoint(settings.target.user, USER)
    settings_keys = settings_needing_model(settings)
    if not settings_keys:
        return
    try:
        model_endpoint = endpoint(settings.llm)
        check_prices(model_endpoint, settings.synthesis.max_cost if settings.synthesis.synthesizer == "llm" else 0)
        check_prices(model_endpoint, settings.prompting.max_cost if settings.training.prompt_first else 0)
    except LlmError as error:
        subject = f"{' and '.join(settings_keys)} {'need' if len(settings_keys) > 1 else 'needs'} a language model"
        raise LlmError(f"{subject}: {error.message}", hint=error.hint) from None


class StoreLedger:
    """An ``agents.llm.question.Ledger`` in the store; the cycle of a purpose must exist there."""

    def __init__(self, store: Engine, now: Callable[[], datetime]) -> None:
        self._store, self._now = store, now

    def find(self, key: str) -> Reply | None:
        """Return the stored reply to a request, or None; see ``agents.llm.question.Ledger``."""
        with read_session(self._store) as session:
            row = find_reply(session, key)
        if row is None:
            return None
        tokens = (row.prompt_tokens, row.completion_tokens)
        return Reply(row.text, row.finish_reason, *tokens, row.cost, row.seconds, row.estimated)

    def keep(self, key: str, question: Question, model: str, reply: Reply) -> None:
        """Store a reply; see ``agents.llm.question.Ledger``."""
        row = ModelReply(
            key=key,
            cycle_id=question.purpose.cycle_id,
            stage=question.purpose.stage,
            capability=question.purpose.capability,
            model=model,
            said=[asdict(message) for message in question.messages],
            at=self._now(),
            **asdict(reply),
        )
        with write_session(self._store) as session:
            save_reply(session, row)

    def usage(self, purpose: Purpose) -> Usage:
        """Return the usage counted for a purpose; see ``agents.llm.question.Ledger``."""
        total = Usage()
        with read_session(self._store) as session:
            for stage_cost in stage_costs(session, purpose.cycle_id, stage=purpose.stage):
                if purpose.capability in ("", stage_cost.capability):
                    tokens = (stage_cost.prompt_tokens, stage_cost.completion_tokens)
                    total = total.combined(Usage(stage_cost.calls, *tokens, stage_cost.cost, stage_cost.seconds))
        return total
