"""Open the model of ``[target.user]`` as the user of episodes."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agents.llm.question import Ledger
from sandbox.user import User
from traced.config.cycle_sections import UserSection
from traced.targets.errors import UserUnavailable


@asynccontextmanager
async def model_user(section: UserSection, data_dir: Path, ledger: Ledger, cycle_id: str) -> AsyncIterator[User]:
    """Open the user's model, whose replies are kept in ``ledger`` and paid by the cycle.

    Raises:
        UserUnavailable: The model is not configured completely.
    """
    # Imported here because the client library takes a second, which only such episodes need.
    from traced.llm.connection import USER, LlmError, endpoint, open_model
    from traced.targets.user import ModelUser

    async with AsyncExitStack() as stack:
        try:
            language_model = await stack.enter_async_context(open_model(endpoint(section, USER), data_dir, ledger))
        except LlmError as error:
            raise UserUnavailable(f"the user's model cannot be asked: {error.message}", hint=error.hint) from error
        yield ModelUser(language_model, cycle_id, section.temperature, section.max_tokens)
