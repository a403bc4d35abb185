"""One conversation in full: the decision on it, its exchanges, what people thought, what it became.

Invariants: it asks again when news come while it is open, and stays where it was scrolled to. How it fails: a refusal
is its text. Not covered: what was said (its trajectories have it).
"""

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from traced.client import ClientError
from traced.client.serving import ConversationView, DecisionView
from tui.help import READING
from tui.plain import line
from tui.screens.serving_told import bar, likely, logprob

if TYPE_CHECKING:
    from tui.app import TracedApp

OK = 200


class ServedConversation(ModalScreen[None]):
    """Closed by Escape."""

    DEFAULT_CSS = """
    ServedConversation { align: center middle; }
    ServedConversation > VerticalScroll { width: 110; max-width: 96%; height: auto; max-height: 90%; padding: 0 1; }
    ServedConversation > VerticalScroll { border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", key_display="Esc"),
        *READING,
    ]

    app: "TracedApp"

    def __init__(self, named: str) -> None:
        super().__init__()
        self._named = named

    def compose(self) -> ComposeResult:
        """A page that scrolls."""
        with VerticalScroll() as frame:
            frame.border_title = Text(f"Conversation {line(self._named, 60)}")
            yield Static("Loading…", id="told", markup=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Ask for it."""
        self.ask()

    @work(exclusive=True)
    async def ask(self) -> None:
        """Ask for it, again where it is shown already."""
        try:
            found = told(await self.app.client.serving.conversation(self._named))
        except ClientError as error:
            found = Text(f"It cannot be shown: {line(error.message)}\n{line(error.hint)}")
        self.query_one("#told", Static).update(found)


def told(found: ConversationView) -> Text:
    """All of it, in the order of happening."""
    text = Text()
    _decision(text, found.decision)
    _heading(text, f"Exchanges ({len(found.exchanges)})")
    for one in found.exchanges:
        failed = one.status != OK
        text.append(f"  {one.at:%m-%d %H:%M:%S}  ")
        text.append(f"{'✗' if failed else '✓'} {one.status}", "bold red" if failed else "green")
        text.append(f"  {one.seconds:6.2f} s  {one.prompt_tokens:>5} + {one.completion_tokens:<5} tokens  ")
        text.append(line(one.model, 30)).append("  ◌ in the shadow" if one.shadow_of else "", "cyan")
        text.append(f"\n      {line(one.detail, 160)}" if one.detail else "", "yellow").append("\n")
    _heading(text, f"Feedback ({len(found.feedback)})")
    for said in found.feedback:
        score = "" if said.score is None else f"score {said.score:g}  "
        label = f"label {line(said.label, 40)}  " if said.label else ""
        text.append(f"  {said.at:%m-%d %H:%M:%S}  {score}{label}{line(said.comment, 160)}")
        text.append(
            f"  {line(said.who, 40)}" + (f", on {line(said.response_id, 40)}" if said.response_id else ""), "dim"
        )
        text.append("\n")
    if not found.feedback:
        text.append("  none\n", "dim")
    _heading(text, f"Trajectories ({len(found.trajectories)})")
    signs = {"success": ("✓", "green"), "failure": ("✗", "red")}
    for became in found.trajectories:
        sign, style = signs.get(became.outcome, ("·", "dim"))
        text.append(f"  {sign} {became.outcome}", style).append(
            f"  reward {became.reward:g}, {became.messages} messages"
        )
        text.append(f"  {line(became.model, 30)}  {line(became.id, 60)}\n", "dim")
    if not found.trajectories:
        text.append("  none yet: one is made when it has been silent for serving.silence_s\n", "dim")
    if found.left_out:
        text.append(f"\n{found.left_out:,} older entries are left out\n", "yellow")
    text.rstrip()
    return text


def _decision(text: Text, decision: DecisionView | None) -> None:
    text.append("Decision", "bold")
    if decision is None:
        text.append("\n  none: a model was asked for by name, or no adapter was live\n", "dim")
        return
    text.append(f"\n  {line(decision.model, 60)}", "bold green")
    text.append(f"  {decision.at:%Y-%m-%d %H:%M:%S} UTC, in {1000 * decision.seconds:.1f} ms")
    text.append("  ◔ takes part in a trial" if decision.trial is not None else "", "yellow").append("\n")
    if decision.why:
        text.append(f"  ! by default: {line(decision.why, 200)}\n", "yellow")
    options = sorted(decision.logprobs.items(), key=lambda one: -likely(one[1]))
    for option, found in options:
        style = "bold" if option == decision.model else "dim"
        text.append(f"  {line(option, 30):<24} ", style).append("▕", "dim").append(bar(likely(found), 16), "green")
        text.append("▏", "dim").append(f" {100 * likely(found):5.1f} %   {logprob(found):>5} nats\n")


def _heading(text: Text, heading: str) -> None:
    text.append(f"\n{heading}\n", "bold")
