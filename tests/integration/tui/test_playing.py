"""An episode played by hand, by keys, against the real sandbox."""

import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandbox.docker_engine import connect, process_identity
from sandbox.policy import LABEL_ENVIRONMENT, LABEL_PROCESS
from tests.integration.tui.conftest import OpenApp, RunningApp
from tests.integration.tui.screens import LARGE, SMALL, USUAL, same_picture, text_of, wait_until
from tests.integration.tui.test_environments import add_environment, open_environment
from traced.api.control import Control
from tui.screens.environment_dialogs import ChooseTool, FillCall, skeleton
from tui.screens.environments import Environment
from tui.widgets.dialogs import Question

NASTY = "\\x1b[31m[red]boo[/red] \\u202eeno"  # escaped as in a Python literal
LAMP_SHOP = (Path(__file__).parents[2] / "data/environments/lamp_shop.py").read_text("utf-8")
BREAKS = LAMP_SHOP.replace("        self.turn += 1\n", "        raise KeyError('no such lamp')\n")


@pytest.fixture
def containers(image: object) -> Iterator[Callable[[str], int]]:
    """Count the containers of an environment that this process started; other pytest workers play the same ones."""
    engine = connect()

    def count(environment: str) -> int:
        process_labels = [f"{LABEL_ENVIRONMENT}={environment}", f"{LABEL_PROCESS}={process_identity(os.getpid())}"]
        return len(engine.containers.list(all=True, filters={"label": process_labels}, ignore_removed=True))

    yield count
    engine.close()


async def run_in_app(
    open_app: OpenApp, play: Callable[[RunningApp], Awaitable[None]], size: tuple[int, int] = (120, 40)
) -> None:
    async with open_app(size) as tui:
        await play(tui)


async def start_episode(tui: RunningApp, key: str, seed: str = "7") -> Environment:
    screen = await open_environment(tui, key)
    await tui.pilot.press("p")
    await wait_until(tui.pilot, lambda: "container. Seed:" in text_of(tui.app))
    await tui.pilot.press(*seed, "enter")
    await wait_until(tui.pilot, lambda: f"● playing seed {seed}: 0 messages sent" in text_of(tui.app))
    return screen


async def set_arguments(tui: RunningApp, text: str) -> None:
    """Replace the text of the arguments field."""
    tui.app.screen.query_one("#arguments").load_text(text)  # type: ignore[attr-defined]
    await tui.pilot.pause()


@pytest.mark.docker
@pytest.mark.parametrize("size", [USUAL, LARGE], ids=str)
async def test_what_an_agent_sees_first_looks_as_it_did(
    open_app: OpenApp, image: object, size: tuple[int, int]
) -> None:
    async def play(tui: RunningApp) -> None:
        await start_episode(tui, tui.seeded.environments["policy-checks"])
        await same_picture(tui.app, "environment-play")
        await tui.pilot.press("ctrl+t")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        await tui.pilot.press("down", "down", "enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
        await same_picture(tui.app, "environment-call")

    await run_in_app(open_app, play, size)


@pytest.mark.docker
async def test_an_episode_is_played_by_keys(open_app: OpenApp, containers: Callable[[str], int]) -> None:
    async def play(tui: RunningApp) -> None:
        key = tui.seeded.environments["policy-checks"]
        await start_episode(tui, key)
        text = text_of(tui.app)
        assert "You work at a shop." in text
        assert "exchange_item(order_id, item_id, new_item_id)" in text
        await same_picture(tui.app, "environment-play")
        assert containers(key) == 1
        await tui.pilot.press("ctrl+t")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        await tui.pilot.press("down", "down", "enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
        await same_picture(tui.app, "environment-call")
        await set_arguments(tui, '{"order_id": ')
        await tui.pilot.press("ctrl+s")
        await wait_until(tui.pilot, lambda: "✗ Expecting value" in text_of(tui.app))
        await set_arguments(tui, "[]")
        await tui.pilot.press("ctrl+s")
        await wait_until(tui.pilot, lambda: "✗ the arguments must be a JSON object in braces" in text_of(tui.app))
        await set_arguments(tui, '{"order_id": "W1", "item_id": "I1", "reason": "damaged"}')
        await tui.pilot.press("ctrl+n")  # submit and add another call
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
        await tui.pilot.press("ctrl+s")
        await wait_until(tui.pilot, lambda: "● playing seed 7: 1 messages sent" in text_of(tui.app))
        await tui.pilot.press(*"No.", "enter")
        await wait_until(tui.pilot, lambda: "● playing seed 7: 2 messages sent" in text_of(tui.app))
        await tui.pilot.press(*"Done.", "enter")
        await wait_until(tui.pilot, lambda: "The episode is done." in text_of(tui.app) and not len(tui.control.playing))
        await same_picture(tui.app, "environment-played")
        assert "✗ no success   reward 0" in text_of(tui.app)
        assert containers(key) == 0
        assert (await tui.client.audit())[0].subject == key

    await run_in_app(open_app, play, SMALL)


@pytest.mark.docker
async def test_an_oracles_way_succeeds(open_app: OpenApp, control: Control, image: object) -> None:
    """Seed 7 of the lamp shop by hand: the order's number, both returns, a last word."""

    async def play(tui: RunningApp) -> None:
        await start_episode(tui, add_environment(control, source=LAMP_SHOP))
        talk = tui.app.screen.query_one("#talk")

        async def call(place: int, **arguments: str) -> None:
            count = text_of(tui.app).partition(" messages sent")[0].rpartition(" ")[2]
            await tui.pilot.press("ctrl+t")
            await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
            await tui.pilot.press(*["down"] * place, "enter")
            await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
            await set_arguments(tui, json.dumps(arguments))
            await tui.pilot.press("ctrl+s")
            await wait_until(tui.pilot, lambda: f": {int(count) + 1} messages sent" in text_of(tui.app))

        await tui.pilot.press(*"Number?", "enter")
        await wait_until(tui.pilot, lambda: "The order is W" in text_of(tui.app))
        order = text_of(tui.app).partition("The order is ")[2][:5]
        await call(0, order_id=order)
        order_data = json.loads("{" + str(talk.children[-1].render()).partition("{")[2])
        for item in order_data["items"]:
            reason = {"mirror": "damaged", "lamp": "not_needed"}[item["name"]]
            await call(2, order_id=order, item_id=item["item_id"], reason=reason)
        await tui.pilot.press(*"Done.", "enter")
        await wait_until(tui.pilot, lambda: "✓ success   reward 1" in text_of(tui.app))
        assert "requests  1" in text_of(tui.app)

    await run_in_app(open_app, play)


@pytest.mark.docker
async def test_escape_ends_it_after_a_question(open_app: OpenApp, containers: Callable[[str], int]) -> None:
    async def play(tui: RunningApp) -> None:
        key = tui.seeded.environments["policy-checks"]
        screen = await start_episode(tui, key)
        for answer in ("n", "escape"):
            await tui.pilot.press("escape")
            await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Question))
            await tui.pilot.press(answer)
            await wait_until(tui.pilot, lambda: tui.app.screen is screen)
        assert containers(key) == 1
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: "The container is removed." in text_of(tui.app))
        await same_picture(tui.app, "environment-end")
        await tui.pilot.press("y")
        await wait_until(tui.pilot, lambda: "You ended the episode." in text_of(tui.app))
        assert "✗ no success   reward 0" in text_of(tui.app)
        assert containers(key) == 0
        await tui.pilot.press("p", "enter")  # a new episode with the same seed
        await wait_until(tui.pilot, lambda: "● playing seed 7: 0 messages sent" in text_of(tui.app))

    await run_in_app(open_app, play)


@pytest.mark.docker
async def test_tabs_and_screens_change_while_it_is_played(open_app: OpenApp, image: object) -> None:
    async def play(tui: RunningApp) -> None:
        screen = await start_episode(tui, tui.seeded.environments["policy-checks"])
        await tui.pilot.press("shift+tab")  # from the field to the conversation
        await tui.pilot.press("s")
        await wait_until(tui.pilot, lambda: "import json" in text_of(tui.app))
        assert "Call a tool" not in text_of(tui.app)
        await tui.pilot.press("1")
        await wait_until(tui.pilot, lambda: tui.app.current_mode == "overview")
        await tui.pilot.press("4")
        await wait_until(tui.pilot, lambda: tui.app.screen is screen)
        await tui.pilot.press("p")  # back to the episode without a question
        await wait_until(tui.pilot, lambda: "● playing seed 7: 0 messages sent" in text_of(tui.app))
        await tui.pilot.press(*"Hm.", "enter")
        await wait_until(tui.pilot, lambda: "● playing seed 7: 1 messages sent" in text_of(tui.app))

    await run_in_app(open_app, play)


@pytest.mark.docker
async def test_choosing_and_filling_in_can_be_left(open_app: OpenApp, image: object) -> None:
    async def play(tui: RunningApp) -> None:
        screen = await start_episode(tui, tui.seeded.environments["policy-checks"])
        await tui.pilot.press("ctrl+t")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: tui.app.screen is screen)
        await tui.pilot.press("enter")  # the field is empty
        assert "● playing seed 7: 0 messages sent" in text_of(tui.app)

    await run_in_app(open_app, play)


@pytest.mark.docker
async def test_hostile_text_is_harmless(open_app: OpenApp, control: Control, image: object) -> None:
    source = LAMP_SHOP.replace("You work at a shop.", NASTY).replace(
        "TOOLS = [", f'TOOLS = [_tool("{NASTY}", **{{"{NASTY}": TEXT}}),'
    )

    async def play(tui: RunningApp) -> None:
        await start_episode(
            tui, add_environment(control, source=source.replace('"The order is', f'"{NASTY} The order is'))
        )
        texts = [text_of(tui.app)]
        await tui.pilot.press("ctrl+t")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, ChooseTool))
        texts.append(text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, FillCall))
        texts.append(text_of(tui.app))
        await tui.pilot.press("ctrl+s")
        await wait_until(tui.pilot, lambda: "seed 7: 1 messages sent" in text_of(tui.app))
        await tui.pilot.press(*"No.", "enter")
        await wait_until(tui.pilot, lambda: "seed 7: 2 messages sent" in text_of(tui.app))
        texts.append(text_of(tui.app))
        for text in texts:
            assert "␛[31m[red]boo[/red] ‹U+202E›eno" in text
            assert not {"\x1b", "\u202e"} & set(text)

    await run_in_app(open_app, play)


@pytest.mark.docker
async def test_a_failure_of_the_environment_is_part_of_the_conversation(
    open_app: OpenApp, control: Control, containers: Callable[[str], int]
) -> None:
    async def play(tui: RunningApp) -> None:
        key = add_environment(control, source=BREAKS)
        await start_episode(tui, key)
        await tui.pilot.press(*"Hi", "enter")
        await wait_until(tui.pilot, lambda: "✗ the episode is over; p: new episode" in text_of(tui.app))
        text = text_of(tui.app)
        assert "the environment failed" in text
        assert "KeyError: 'no such lamp'" in text
        assert "esc Back" in text
        assert containers(key) == 0

    await run_in_app(open_app, play)


async def test_without_docker_it_says_what_to_do(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    async def play(tui: RunningApp) -> None:
        await open_environment(tui, tui.seeded.environments["policy-checks"])
        await tui.pilot.press("p")
        await wait_until(tui.pilot, lambda: "container. Seed:" in text_of(tui.app))
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: "Press p to play" in text_of(tui.app))
        await tui.pilot.press("p", "enter")
        await wait_until(tui.pilot, lambda: "✗ no episode is running; p: try again" in text_of(tui.app))
        assert "scripts/docker-engine.sh" in text_of(tui.app)
        assert "Try: traced doctor" in text_of(tui.app)

    await run_in_app(open_app, play)


async def test_read_only_offers_no_play(open_app: OpenApp) -> None:
    async with open_app((80, 24), read_only=True) as tui:
        screen = await open_environment(tui, tui.seeded.environments["policy-checks"])
        await tui.pilot.press("p")
        assert tui.app.screen is screen
        screen.query_one("#tabs").active = "play-tab"  # type: ignore[attr-defined]
        await wait_until(tui.pilot, lambda: "⊘ This connection is read-only" in text_of(tui.app))
        await same_picture(tui.app, "environment-read-only")


def test_a_skeleton_has_what_is_required() -> None:
    inner = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {}}, "required": ["city"]}
    schema = {
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["a", "b"]},
            "count": {"type": ["integer", "null"]},
            "fast": {"type": "boolean", "default": True},
            "to": inner,
            "odd": 3,
            "left_out": {"type": "string"},
        },
        "required": ["name", "kind", "count", "fast", "to", "odd"],
    }
    expected = {"name": "", "kind": "a", "count": 0, "fast": True, "to": {"city": ""}, "odd": None}
    assert json.loads(skeleton(schema)) == expected
    assert skeleton({"properties": 4, "required": "all"}) == "{}"
