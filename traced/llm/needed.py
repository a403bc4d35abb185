"""Whether a cycle that will ask a language model has one to ask: told as it begins, and not hours later by a stage.

How it fails: ``LlmError`` names the settings that want a model, what is missing (prices too, where money is bounded),
and what to do. Not covered: whether
the server is there and takes the key (``traced llm check``): it may come up while the cycle collects.
"""

from traced.config import Settings
from traced.llm.connect import check_prices, endpoint
from traced.llm.errors import LlmError


def wanting(settings: Settings) -> list[str]:
    """The settings of a cycle's stations for which a language model is asked."""
    wanted = {
        "analysis.analyst=llm": settings.analysis.analyst == "llm",
        "synthesis.synthesizer=llm": settings.synthesis.synthesizer == "llm",
        "training.prompt_first=true": settings.training.prompt_first,
    }
    return [setting for setting, wants in wanted.items() if wants]


def check_model(settings: Settings) -> None:
    """Raise ``LlmError`` where the settings want a language model and name none, or its key cannot be read."""
    wanted = wanting(settings)
    if not wanted:
        return
    try:
        described = endpoint(settings.llm)
        check_prices(described, settings.synthesis.max_cost if settings.synthesis.synthesizer == "llm" else 0)
        check_prices(described, settings.prompting.max_cost if settings.training.prompt_first else 0)
    except LlmError as error:
        who = f"{' and '.join(wanted)} {'need' if len(wanted) > 1 else 'needs'} a language model"
        raise LlmError(f"{who}: {error.message}", hint=error.hint) from None
