"""A panel where a person plays an episode in the place of the agent: the conversation, the input, the score.

Invariants: one message is in flight at a time, and the container is removed as soon as the episode is done. A failure
is shown in the conversation, and the typed text stays in the input. The episode continues after a lost connection or
one of the refusals in ``GOES_ON``; any other refusal ends it.
"""

import json
from http import HTTPStatus
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Input, Static

from traced.client import ClientError, RequestRefused
from traced.client.environments import Answer, PlayedCall, PlayedEpisode, PlayedMessage, ScoreView
from tui.connection import ConnectedApp
from tui.screens.environment_dialogs import ChooseTool, FillCall, tool_line
from tui.text import sanitize_block, sanitize_line

IDLE = (
    "Press p to play an episode by hand: you are the agent, the environment answers from a sandbox container.\n"
    "No model is involved; the environment computes the score."
)
READ_ONLY = "⊘ This connection is read-only: playing an episode needs full access."
GOES_ON = (HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.CONFLICT, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
LINE_LENGTH = 100  # maximum characters of a tool's JSON that is shown on one line


class Play(Vertical):
    """The panel: the conversation, below it the state line and the input for the agent's next message."""

    DEFAULT_CSS = """
    Play { height: 1fr; }
    Play #talk { height: 1fr; padding: 0 1; }
    Play .said { height: auto; padding: 0 1; border-left: thick $panel-lighten-2; margin-bottom: 1; }
    Play .user { border-left: thick $primary; }
    Play .assistant { border-left: thick $success; }
    Play .tool { border-left: thick $warning; }
    Play .wrong { border-left: thick $error; }
    Play #stands { height: 1; padding: 0 1; color: $text-muted; }
    """
    app: ConnectedApp

    def __init__(self, environment: str) -> None:
        super().__init__()
        self._environment = environment
        self._episode: PlayedEpisode | None = None
        # Calls of the message that is being composed.
        self._by_now: list[PlayedCall] = []
        self._busy = False
        self._sent_count = 0
        self.seed = 0

    def compose(self) -> ComposeResult:
        """Yield the conversation (at first with instructions), the state line and the input."""
        with VerticalScroll(id="talk"):
            yield Static(READ_ONLY if self.app.read_only else IDLE, classes="said", markup=False)
        yield Static("", id="stands", markup=False)
        yield Input(placeholder="Message of the agent; Enter sends it", id="say", compact=True)

    def on_mount(self) -> None:
        """Hide the input until an episode runs."""
        self._show_state("")

    @property
    def running(self) -> bool:
        """Whether an episode is open."""
        return self._episode is not None

    def take_focus(self) -> None:
        """Focus the input."""
        self.query_one("#say").focus()

    async def begin(self, seed: int) -> None:
        """Start an episode in a container and show what an agent sees first."""
        if self._busy:
            return
        self.seed, self._sent_count, self._by_now = seed, 0, []
        self._busy = True
        self._show_state("… starting a container")
        await self.query_one("#talk").remove_children()
        try:
            self._episode = await self.app.client.environments.play(self._environment, seed)
        except ClientError as error:
            self._failed(error)
            self._show_state("✗ no episode is running; p: try again")
            return
        finally:
            self._busy = False
        self._put("system prompt", self._episode.system)
        self._put_tools(self._episode.tools)
        for message in self._episode.messages:
            self._put_message(message)
        self._show_state()
        self.take_focus()

    async def call(self) -> None:
        """Let the person choose a tool and fill in its arguments; several calls can make one message."""
        while self._episode is not None and not self._busy:
            if not self._episode.tools:
                self.app.notify("The task has no tools.", timeout=4)
                return
            index = await self.app.push_screen_wait(ChooseTool(self._episode.tools))
            if index is None:
                return
            filled_call = await self.app.push_screen_wait(FillCall(self._episode.tools[index]))
            if filled_call is None:
                continue
            self._by_now.append(filled_call[0])
            self._show_state()
            if filled_call[1]:
                await self._send()
                return

    async def on_input_submitted(self) -> None:
        """Send the typed text with the pending tool calls."""
        await self._send()

    async def end(self) -> None:
        """End the episode and remove its container."""
        if self._episode is None:
            return
        episode, self._episode = self._episode.id, None
        self._show_state("… removing the container")
        try:
            done = await self.app.client.environments.end(episode)
        except ClientError as error:
            self._failed(error)
            self._show_state("○ the episode is over")
            return
        score = done.detail.get("score")
        self._show_score(ScoreView.model_validate(score) if score else None, "You ended the episode.")

    async def _send(self) -> None:
        field = self.query_one("#say", Input)
        message = PlayedMessage(content=field.value or None, calls=self._by_now)
        if self._episode is None or self._busy or not (message.content or message.calls):
            return
        self._busy = True
        self._show_state("… waiting for the environment")
        try:
            answer = await self.app.client.environments.say(self._episode.id, message)
        except ClientError as error:
            self._failed(error)
            self._by_now = []
            if isinstance(error, RequestRefused) and error.status not in GOES_ON:
                self._episode = None
                self._show_state("✗ the episode is over; p: new episode")
            else:
                self._show_state()
            return
        finally:
            self._busy = False
        field.value, self._by_now = "", []
        await self._take(answer)

    async def _take(self, answer: Answer) -> None:
        self._sent_count += 1
        self._put_message(answer.sent)
        names = {call["id"]: call["function"]["name"] for call in answer.sent.get("tool_calls") or []}
        for message in answer.messages:
            self._put_message(message, names.get(str(message.get("tool_call_id")), ""))
        if not answer.done:
            self._show_state()
            return
        assert self._episode is not None
        episode, self._episode = self._episode.id, None
        self._show_score(answer.score, "The episode is done.")
        try:
            await self.app.client.environments.end(episode)
        except ClientError:
            # The daemon removes an idle container by itself.
            return

    def _show_score(self, score: ScoreView | None, reason: str) -> None:
        if score is None:
            self._show_state(f"○ {reason} The environment returned no score.")
            return
        text = Text("✓ success" if score.success else "✗ no success", "bold green" if score.success else "bold red")
        text.append(f"   reward {score.reward:.4g}", "bold")
        name_width = max((len(sanitize_line(name, 40)) for name in score.parts), default=0)
        for name, value in score.parts.items():
            text.append(f"\n  {sanitize_line(name, 40):<{name_width}}  {value:.4g}", "not bold")
        self._add("score", text, "")
        self._show_state(f"○ {reason} p: new episode")

    def _put_message(self, message: dict[str, Any], name: str = "") -> None:
        role = str(message.get("role"))
        parts = [_format_json(message["content"], role)] if message.get("content") else []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            parts.append(f"→ {sanitize_line(function['name'], 100)} {_format_json(function['arguments'], 'tool')}")
        title = {"user": "user", "assistant": "you, as the agent", "tool": f"tool {sanitize_line(name, 60)}"}.get(
            role, role
        )
        self._put(title, "\n".join(parts) or "(empty)", role)

    def _put_tools(self, tools: list[dict[str, Any]]) -> None:
        content = Text("\n", end="").join(tool_line(tool) for tool in tools) if tools else Text("none", "dim")
        self._add("tools", content, "")

    def _put(self, title: str, text: str, role: str = "") -> None:
        self._add(title, Text(sanitize_block(text)), role)

    def _failed(self, error: ClientError) -> None:
        hint = f"\nTry: {sanitize_block(error.hint, 400)}" if error.hint else ""
        self._add("error", Text(f"✗ {sanitize_block(error.message, 4000)}{hint}"), "wrong")

    def _add(self, title: str, content: Text, role: str) -> None:
        talk = self.query_one("#talk", VerticalScroll)
        style_class = role if role in ("user", "assistant", "tool", "wrong") else ""
        block = Static(Text.assemble((f"{title}\n", "dim"), content), classes=f"said {style_class}")
        talk.mount(block)
        self.call_after_refresh(talk.scroll_end, animate=False)

    def _show_state(self, state: str | None = None) -> None:
        """Update the state line and the keys."""
        pending = f"; {len(self._by_now)} tool calls will be sent with the next message" if self._by_now else ""
        progress = f"● playing seed {self.seed}: {self._sent_count} messages sent{pending}"
        self.query_one("#stands", Static).update(progress if state is None else state)
        field = self.query_one("#say", Input)
        field.display = self.running
        field.disabled = self._busy and not self.running
        self.screen.refresh_bindings()


def _format_json(text: object, role: str) -> str:
    """Format a tool's JSON on one line if it is short, else on several; return other text unchanged."""
    if role != "tool":
        return str(text)
    try:
        value = json.loads(str(text))
        compact = json.dumps(value, ensure_ascii=False)
        return compact if len(compact) <= LINE_LENGTH else json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return str(text)
