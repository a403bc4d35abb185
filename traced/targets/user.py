"""A language model that speaks as the user of a target's episodes.

Invariants: a reply is kept in the ledger before it is used and found again by the hash of its request and the trial,
so that a run can be played again without the model, and two agents that say the same hear the same. A message that
``user_checks`` refuses is asked for again, ``USER_ATTEMPTS`` times in all, and never used.

How it fails: ``SimulatorError`` costs one episode, which is not held against the agent: no usable message, a request
that the server refuses. ``ConversationTooLong`` ends it as a conversation does that outgrows the agent's context.
``UserUnavailable`` ends the stage, and the cycle waits: no server, or a wrong key.
"""

from typing import Any

from agents.errors import ModelDenied, ModelError, ModelRefused, ModelUnavailable, OutOfForm
from agents.llm.model import Model
from agents.llm.question import ChatMessage, Purpose, Question
from sandbox.user import USER_ATTEMPTS
from traced.targets.errors import ConversationTooLong, SimulatorError, UserUnavailable
from traced.targets.user_checks import fault_of

STAGE = "user"
VARIANTS = 1000  # of one message in the ledger
REPEAT_TEMPERATURE = 0.7  # at least: at 0 the same message would come again
FIRST_PROMPT = "(The conversation begins. Write your first message.)"


class ModelUser:
    """A user behind an OpenAI-compatible server; its usage is counted for the stage "user" of the cycle.

    Args:
        model: The open model.
        cycle_id: The cycle that pays.
        temperature: Sampling temperature of a first reply.
        max_tokens: Limit of one message.
    """

    def __init__(self, model: Model, cycle_id: str, temperature: float, max_tokens: int) -> None:
        self._model, self._purpose = model, Purpose(cycle_id, STAGE)
        self._temperature, self._max_tokens = temperature, max_tokens

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        """Return what the user says; see ``sandbox.user.User``."""
        fault, requests = "", 0
        for variant in range(VARIANTS):
            question = self._question(request, trial * VARIANTS + variant, variant > 0)
            # A refused reply is stored too. It is not used again, and a later round asks for others.
            requests += self._model.ledger.find(question.key(self._model.endpoint.model, None)) is None
            if requests > USER_ATTEMPTS:
                break
            try:
                text = await self._write(question)
            except OutOfForm as error:
                fault = error.message
                continue
            except ConversationTooLong as error:
                if any(message["role"] == "assistant" for message in request["messages"]):
                    raise
                # Nobody has spoken with the user yet: its instructions alone are too long.
                raise SimulatorError(error.message, hint=error.hint) from error
            fault = fault_of(request, text)
            if not fault:
                return text
        raise SimulatorError(
            f"the user's model gave no usable message in {USER_ATTEMPTS} attempts; the last one: {fault}",
            hint="target.user.model, or target.user.max_tokens if messages are cut off",
        )

    def _question(self, request: dict[str, Any], variant: int, is_repeat: bool) -> Question:
        messages = [ChatMessage(message["role"], message.get("content") or "") for message in request["messages"]]
        if not any(message.role == "user" for message in messages):
            messages.append(ChatMessage("user", FIRST_PROMPT))
        return Question(
            self._purpose,
            (ChatMessage("system", str(request["system"])), *messages),
            variant,
            max(self._temperature, REPEAT_TEMPERATURE) if is_repeat else self._temperature,
            self._max_tokens,
        )

    async def _write(self, question: Question) -> str:
        try:
            return (await self._model.write(question)).strip()
        except (ModelUnavailable, ModelDenied) as error:
            raise UserUnavailable(f"the user's model cannot be asked: {error.message}", hint=error.hint) from error
        except OutOfForm:
            raise
        except ModelRefused as error:
            if "does not fit" in error.message or "context" in error.message.lower():
                raise ConversationTooLong(f"the user's model: {error.message}", hint=error.hint) from error
            raise SimulatorError(f"the user's model: {error.message}", hint=error.hint) from error
        except ModelError as error:
            raise SimulatorError(f"the user's model: {error.message}", hint=error.hint) from error
