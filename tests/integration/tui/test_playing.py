"""An episode played by hand, by keys, against the real sandbox."""

import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from sandbox.docker_engine import connect, process_identity
from sandbox.policy import LABEL_ENVIRONMENT, LABEL_PROCESS
from tests.integration.tui.conftest import Opened, Running
from tests.integration.tui.screens import LARGE, SMALL, USUAL, same_picture, text_of, until
from tests.integration.tui.test_environments import put, to_one
from traced.api.control import Control
from tui.screens.environment_dialogs import ChooseTool, FillCall, skeleton
from tui.screens.environments import Environment
from tui.widgets.dialogs import Question

NASTY = "\\x1b[31m[red]boo[/red] \\u202eeno"  # as a Python literal has it
LAMP_SHOP = (Path(__file__).parents[2] / "data/environments/lamp_shop.py").read_text("utf-8")
BREAKS = LAMP_SHOP.replace("        self.turn += 1\n", "        raise KeyError('no such lamp')\n")


@pytest.fixture
def containers(image: object) -> Iterator[Callable[[str], int]]:
    """How many containers of an environment this process has; other workers of pytest play the same environments."""
    engine = connect()

    def count(environment: str) -> int:
        marks = {"label": [f"{LABEL_ENVIRONMENT}={environment}", f"{LABEL_PROCESS}={process_identity(os.getpid())}"]}
        return len(engine.containers.list(all=True, filters=marks, ignore_removed=True))

    yield count
    engine.close()


async def press(opened: Opened, use: Callable[[Running], Awaitable[None]], size: tuple[int, int] = (120, 40)) -> None:
    async with opened(size) as on:
        await use(on)


async def begin(on: Running, key: str, seed: str = "7") -> Environment:
    screen = await to_one(on, key)
    await on.pilot.press("p")
    await until(on.pilot, lambda: "container. Seed:" in text_of(on.app))
    await on.pilot.press(*seed, "enter")
    await until(on.pilot, lambda: f"● playing seed {seed}: 0 messages sent" in text_of(on.app))
    return screen


async def type_over(on: Running, text: str) -> None:
    """Into the arguments."""
    on.app.screen.query_one("#arguments").load_text(text)  # type: ignore[attr-defined]
    await on.pilot.pause()


@pytest.mark.docker
@pytest.mark.parametrize("size", [USUAL, LARGE], ids=str)
async def test_what_an_agent_sees_first_looks_as_it_did(opened: Opened, image: object, size: tuple[int, int]) -> None:
    async def play(on: Running) -> None:
        await begin(on, on.seeded.environments["policy-checks"])
        await same_picture(on.app, "environment-play")
        await on.pilot.press("ctrl+t")
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        await on.pilot.press("down", "down", "enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
        await same_picture(on.app, "environment-call")

    await press(opened, play, size)


@pytest.mark.docker
async def test_an_episode_is_played_by_keys(opened: Opened, containers: Callable[[str], int]) -> None:
    async def play(on: Running) -> None:
        key = on.seeded.environments["policy-checks"]
        await begin(on, key)
        shown = text_of(on.app)
        assert "You work at a shop." in shown
        assert "exchange_item(order_id, item_id, new_item_id)" in shown
        await same_picture(on.app, "environment-play")
        assert containers(key) == 1
        await on.pilot.press("ctrl+t")
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        await on.pilot.press("down", "down", "enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
        await same_picture(on.app, "environment-call")
        await type_over(on, '{"order_id": ')
        await on.pilot.press("ctrl+s")
        await until(on.pilot, lambda: "✗ Expecting value" in text_of(on.app))
        await type_over(on, "[]")
        await on.pilot.press("ctrl+s")
        await until(on.pilot, lambda: "✗ the arguments must be a JSON object in braces" in text_of(on.app))
        await type_over(on, '{"order_id": "W1", "item_id": "I1", "reason": "damaged"}')
        await on.pilot.press("ctrl+n")  # and another
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
        await on.pilot.press("ctrl+s")
        await until(on.pilot, lambda: "● playing seed 7: 1 messages sent" in text_of(on.app))
        await on.pilot.press(*"No.", "enter")
        await until(on.pilot, lambda: "● playing seed 7: 2 messages sent" in text_of(on.app))
        await on.pilot.press(*"Done.", "enter")
        await until(on.pilot, lambda: "The episode is done." in text_of(on.app) and not len(on.control.playing))
        await same_picture(on.app, "environment-played")
        assert "✗ no success   reward 0" in text_of(on.app)
        assert containers(key) == 0
        assert (await on.client.audit())[0].subject == key

    await press(opened, play, SMALL)


@pytest.mark.docker
async def test_an_oracles_way_succeeds(opened: Opened, control: Control, image: object) -> None:
    """Seed 7 of the lamp shop by hand: the order's number, both returns, a last word."""

    async def play(on: Running) -> None:
        await begin(on, put(control, source=LAMP_SHOP))
        talk = on.app.screen.query_one("#talk")

        async def call(place: int, **arguments: str) -> None:
            said = text_of(on.app).partition(" messages sent")[0].rpartition(" ")[2]
            await on.pilot.press("ctrl+t")
            await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
            await on.pilot.press(*["down"] * place, "enter")
            await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
            await type_over(on, json.dumps(arguments))
            await on.pilot.press("ctrl+s")
            await until(on.pilot, lambda: f": {int(said) + 1} messages sent" in text_of(on.app))

        await on.pilot.press(*"Number?", "enter")
        await until(on.pilot, lambda: "The order is W" in text_of(on.app))
        order = text_of(on.app).partition("The order is ")[2][:5]
        await call(0, order_id=order)
        found = json.loads("{" + str(talk.children[-1].render()).partition("{")[2])
        for item in found["items"]:
            reason = {"mirror": "damaged", "lamp": "not_needed"}[item["name"]]
            await call(2, order_id=order, item_id=item["item_id"], reason=reason)
        await on.pilot.press(*"Done.", "enter")
        await until(on.pilot, lambda: "✓ success   reward 1" in text_of(on.app))
        assert "requests  1" in text_of(on.app)

    await press(opened, play)


@pytest.mark.docker
async def test_escape_ends_it_after_a_question(opened: Opened, containers: Callable[[str], int]) -> None:
    async def play(on: Running) -> None:
        key = on.seeded.environments["policy-checks"]
        screen = await begin(on, key)
        for answer in ("n", "escape"):
            await on.pilot.press("escape")
            await until(on.pilot, lambda: isinstance(on.app.screen, Question))
            await on.pilot.press(answer)
            await until(on.pilot, lambda: on.app.screen is screen)
        assert containers(key) == 1
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "The container is removed." in text_of(on.app))
        await same_picture(on.app, "environment-end")
        await on.pilot.press("y")
        await until(on.pilot, lambda: "You ended the episode." in text_of(on.app))
        assert "✗ no success   reward 0" in text_of(on.app)
        assert containers(key) == 0
        await on.pilot.press("p", "enter")  # another, of the same seed
        await until(on.pilot, lambda: "● playing seed 7: 0 messages sent" in text_of(on.app))

    await press(opened, play)


@pytest.mark.docker
async def test_tabs_and_screens_change_while_it_is_played(opened: Opened, image: object) -> None:
    async def play(on: Running) -> None:
        screen = await begin(on, on.seeded.environments["policy-checks"])
        await on.pilot.press("shift+tab")  # from the field to the conversation
        await on.pilot.press("s")
        await until(on.pilot, lambda: "import json" in text_of(on.app))
        assert "Call a tool" not in text_of(on.app)
        await on.pilot.press("1")
        await until(on.pilot, lambda: on.app.current_mode == "overview")
        await on.pilot.press("4")
        await until(on.pilot, lambda: on.app.screen is screen)
        await on.pilot.press("p")  # back to it, nothing is asked
        await until(on.pilot, lambda: "● playing seed 7: 0 messages sent" in text_of(on.app))
        await on.pilot.press(*"Hm.", "enter")
        await until(on.pilot, lambda: "● playing seed 7: 1 messages sent" in text_of(on.app))

    await press(opened, play)


@pytest.mark.docker
async def test_choosing_and_filling_in_can_be_left(opened: Opened, image: object) -> None:
    async def play(on: Running) -> None:
        screen = await begin(on, on.seeded.environments["policy-checks"])
        await on.pilot.press("ctrl+t")
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: on.app.screen is screen)
        await on.pilot.press("enter")  # nothing to say
        assert "● playing seed 7: 0 messages sent" in text_of(on.app)

    await press(opened, play)


@pytest.mark.docker
async def test_hostile_text_is_harmless(opened: Opened, control: Control, image: object) -> None:
    source = LAMP_SHOP.replace("You work at a shop.", NASTY).replace(
        "TOOLS = [", f'TOOLS = [_tool("{NASTY}", **{{"{NASTY}": TEXT}}),'
    )

    async def play(on: Running) -> None:
        await begin(on, put(control, source=source.replace('"The order is', f'"{NASTY} The order is')))
        shown = [text_of(on.app)]
        await on.pilot.press("ctrl+t")
        await until(on.pilot, lambda: isinstance(on.app.screen, ChooseTool))
        shown.append(text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, FillCall))
        shown.append(text_of(on.app))
        await on.pilot.press("ctrl+s")
        await until(on.pilot, lambda: "seed 7: 1 messages sent" in text_of(on.app))
        await on.pilot.press(*"No.", "enter")
        await until(on.pilot, lambda: "seed 7: 2 messages sent" in text_of(on.app))
        shown.append(text_of(on.app))
        for text in shown:
            assert "␛[31m[red]boo[/red] ‹U+202E›eno" in text
            assert not {"\x1b", "\u202e"} & set(text)

    await press(opened, play)


@pytest.mark.docker
async def test_a_failure_of_the_environment_is_part_of_the_conversation(
    opened: Opened, control: Control, containers: Callable[[str], int]
) -> None:
    async def play(on: Running) -> None:
        key = put(control, source=BREAKS)
        await begin(on, key)
        await on.pilot.press(*"Hi", "enter")
        await until(on.pilot, lambda: "✗ the episode is over; p: new episode" in text_of(on.app))
        shown = text_of(on.app)
        assert "the environment failed" in shown
        assert "KeyError: 'no such lamp'" in shown
        assert "esc Back" in shown
        assert containers(key) == 0

    await press(opened, play)


async def test_without_docker_it_says_what_to_do(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    async def play(on: Running) -> None:
        await to_one(on, on.seeded.environments["policy-checks"])
        await on.pilot.press("p")
        await until(on.pilot, lambda: "container. Seed:" in text_of(on.app))
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "Press p to play" in text_of(on.app))
        await on.pilot.press("p", "enter")
        await until(on.pilot, lambda: "✗ no episode is running; p: try again" in text_of(on.app))
        assert "scripts/docker-engine.sh" in text_of(on.app)
        assert "Try: traced doctor" in text_of(on.app)

    await press(opened, play)


async def test_read_only_offers_no_play(opened: Opened) -> None:
    async with opened((80, 24), read_only=True) as on:
        screen = await to_one(on, on.seeded.environments["policy-checks"])
        await on.pilot.press("p")
        assert on.app.screen is screen
        screen.query_one("#tabs").active = "play-tab"  # type: ignore[attr-defined]
        await until(on.pilot, lambda: "⊘ This connection is read-only" in text_of(on.app))
        await same_picture(on.app, "environment-read-only")


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
    made = {"name": "", "kind": "a", "count": 0, "fast": True, "to": {"city": ""}, "odd": None}
    assert json.loads(skeleton(schema)) == made
    assert skeleton({"properties": 4, "required": "all"}) == "{}"
