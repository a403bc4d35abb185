"""The user of an episode: what an environment may ask it, how often, and who is blamed where it does not speak."""

from typing import Any

import pytest

from sandbox.contract import Message
from sandbox.errors import AgentFault, EnvironmentFault, UserFault
from sandbox.goal_user import GREETING, MAX_USER_TURNS, goal_reply
from sandbox.user import MAX_REQUEST_BYTES, MAX_REQUESTS, GoalUser, User, UserTurns, asks_for_model

REQUEST = {"system": "You are Ann.", "goal": "Cancel W1.", "messages": [], "stops": ["STOP"]}
TASK = {"system": "s", "messages": [], "tools": []}


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


class Recording:
    """Answers like an environment that asks ``questions`` times, and records what it gets."""

    def __init__(self, questions: int = 0, request: Any = None) -> None:
        self.questions, self.request = questions, request or REQUEST
        self.texts: list[str] = []

    async def send(self, text: str) -> dict[str, Any]:
        self.texts.append(text)
        self.questions -= 1
        return {
            "messages": [user_message(text)],
            "done": False,
            **({"user": self.request} if self.questions > 0 else {}),
        }


def turns(recording: Recording, user: User | None = None, trial: int = 0) -> UserTurns:
    return UserTurns(user or GoalUser(), trial, recording.send, MAX_REQUESTS, MAX_REQUEST_BYTES)


class Hearing:
    """A user that keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], int]] = []

    async def reply(self, request: dict[str, Any], trial: int = 0) -> str:
        self.requests.append((request, trial))
        return "so"


async def test_what_the_user_says_is_part_of_task_and_step() -> None:
    recording, user = Recording(), Hearing()
    part = turns(recording, user, trial=3)
    task = await part.task({"task": TASK, "user": {**REQUEST, "secret": 1}})
    assert task.messages == [user_message("so")]
    # Nothing but the contract's keys reaches the user.
    assert user.requests == [(REQUEST, 3)]
    tool: Message = {"role": "tool", "tool_call_id": "c1", "content": "{}"}
    step = await part.step({"messages": [tool], "done": False, "user": REQUEST})
    assert (step.messages, step.done) == ([tool, user_message("so")], False)
    assert recording.texts == ["so", "so"]


async def test_an_ended_episode_asks_nobody() -> None:
    recording = Recording()
    step = await turns(recording).step({"messages": [], "done": True, "user": REQUEST})
    assert step.done
    assert recording.texts == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({**REQUEST, "system": "x" * MAX_REQUEST_BYTES}, "user_request has 65,6.. bytes, more than 65,536"),
        ({**REQUEST, "stops": ["a"] * 17}, "at most 16 texts"),
        ({**REQUEST, "messages": [3]}, "a message of user_request is 3; it must be an object"),
        ([], "user_request is \\[\\]; it must be an object"),
    ],
)
async def test_a_request_that_the_contract_forbids_is_never_asked(request_: object, message: str) -> None:
    user = Hearing()
    with pytest.raises(EnvironmentFault, match=message):
        await turns(Recording(), user).step({"messages": [], "done": False, "user": request_})
    assert user.requests == []


async def test_an_episode_asks_a_bounded_number_of_times() -> None:
    part, answer = turns(Recording()), {"messages": [], "done": False, "user": REQUEST}
    for _ in range(MAX_REQUESTS):
        await part.step(answer)
    with pytest.raises(EnvironmentFault, match="more than 128 messages of the user in an episode"):
        await part.step(answer)
    with pytest.raises(EnvironmentFault, match="more than 4 messages of the user in one turn"):
        await turns(Recording(MAX_USER_TURNS + 1)).step(answer)
    assert len((await turns(Recording(MAX_USER_TURNS)).step(answer)).messages) == MAX_USER_TURNS


async def test_a_user_that_is_missing_or_says_too_much_is_no_fault_of_the_agent() -> None:
    async def refuse(text: str) -> dict[str, Any]:
        raise AgentFault("the message for 'user' has 2000000 bytes, more than 1048576")

    answer = {"messages": [], "done": False, "user": REQUEST}
    with pytest.raises(UserFault, match="asks for a user that is a model, and there is none"):
        await UserTurns(None, 0, refuse).step(answer)
    with pytest.raises(UserFault, match=r"cannot be sent to the environment: .* 2000000 bytes"):
        await UserTurns(GoalUser(), 0, refuse).step(answer)


def test_the_goal_user_states_its_goal_and_ends_the_conversation() -> None:
    second_request = {**REQUEST, "messages": [{"role": "assistant", "content": "Cancel W1."}]}
    assert [goal_reply(REQUEST), goal_reply(second_request)] == ["Cancel W1.", "STOP"]
    assert goal_reply({**second_request, "stops": []}) == "Cancel W1."
    assert goal_reply({**REQUEST, "goal": ""}) == GREETING


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ("description = {'user': 'model'}", True),
        ("description: dict[str, str] = {'user': 'model'}", True),
        ("description = {'user': 'scripted'}", False),
        ("description = dict(user='model')", False),
        ("description = ['user', 'model']", False),
        ("pass", False),
    ],
)
def test_a_file_says_by_its_description_that_its_user_is_a_model(body: str, asks: bool) -> None:
    source = f"class Environment:\n    {body}\n"
    assert asks_for_model(source) is asks
    assert asks_for_model(source.replace("Environment", "Other")) is False


def test_a_file_that_is_no_python_asks_for_nobody() -> None:
    assert asks_for_model("class Environment(:") is False
