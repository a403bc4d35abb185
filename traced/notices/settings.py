"""The settings of notifications: ``[notify]``."""

from typing import Annotated

from pydantic import Field, model_validator

from traced.section import Positive, Section

HookName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class WebhookSettings(Section):
    """Where to POST notices; ``name`` is what the store remembers deliveries by, so keep it when the URL changes."""

    name: HookName
    url: str = Field(pattern=r"^https?://")
    secret_file: str = ""


class CommandSettings(Section):
    """A program that gets each notice as JSON on its standard input."""

    name: HookName
    argv: tuple[str, ...] = Field(min_length=1)


Hook = WebhookSettings | CommandSettings


class NotifySection(Section):
    """Who is told when a person is needed or something is parked."""

    webhooks: tuple[WebhookSettings, ...] = Field(
        default=(), description='e.g. [{name = "ops", url = "https://...", secret_file = "/run/secrets/webhook"}]'
    )
    commands: tuple[CommandSettings, ...] = Field(
        default=(), description='e.g. [{name = "mail", argv = ["/usr/local/bin/tell"]}]; JSON on standard input'
    )
    timeout_s: float = Field(default=10.0, gt=0, description="seconds for one delivery")
    tries: Positive = Field(default=12, description="deliveries tried before one is given up")
    backoff_s: float = Field(default=15.0, gt=0, description="seconds before the second try; they double each time")
    backoff_cap_s: float = Field(default=3600.0, gt=0, description="longest wait between two tries, seconds")

    @property
    def hooks(self) -> list[Hook]:
        """All hooks."""
        return [*self.webhooks, *self.commands]

    @property
    def names(self) -> list[str]:
        """The names of all hooks."""
        return [hook.name for hook in self.hooks]

    @model_validator(mode="after")
    def _names_differ(self) -> "NotifySection":
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"two hooks are named {twice[0]!r}; deliveries are remembered by name")
        return self
