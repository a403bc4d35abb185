"""Date reasoning: was "in 3 days" turned into the right date?

Needed when the user gave a relative date, today's date is known and a call with a date was made (a write, where the
target has writes with dates). Right dates are those the user's words may mean, those the user wrote out, and those that
an observation gave in answer to a right date. Lacking when the first date that the agent used, or one that it wrote, is
no right one. Not covered: dates relative to another event.
"""

from datetime import date

from agents.analyst.corpus import Corpus
from agents.analyst.dates import resolve, today_in
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.tools import ToolKind
from agents.analyst.values import ISO_DATE, is_date, leaves
from agents.analyst.view import View
from agents.transcript import Call


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    today = today_in(view.spoken.system) or _today_observed(view)
    if today is None:
        return NOT_NEEDED
    dated = [(call, days) for call in view.spoken.calls if (days := _dates(call, corpus))]
    written = [call for call, _ in dated if corpus.kinds[call.name] is ToolKind.WRITE]
    if not dated or (_writes_dates(corpus) and not written):
        return NOT_NEEDED
    right = _meant(view, today, dated[0][0].index)
    if not right:
        return NOT_NEEDED
    for place, (call, days) in enumerate(dated):
        if (place == 0 or call in written) and not days & (right | _meant(view, today, call.index)):
            return lacking(call.index)
        if days & right and call.result is not None:
            right |= {day for _, value in leaves(call.result.value) for day in ISO_DATE.findall(str(value))}
    return present(dated[-1][0].index)


def _meant(view: View, today: date, before: int) -> set[str]:
    """The dates that relative expressions may mean and, if there are any, the dates that the user wrote out."""
    said = "\n".join(one.text for one in view.spoken.user_before(before))
    relative = {day.isoformat() for day in resolve(said, today)}
    return relative | set(ISO_DATE.findall(said)) if relative else set()


def _dates(call: Call, corpus: Corpus) -> set[str]:
    return {
        value for path, value in leaves(call.arguments or {}) if (call.name, path) in corpus.dated and is_date(value)
    }


def _writes_dates(corpus: Corpus) -> bool:
    return any(corpus.kinds[tool] is ToolKind.WRITE for tool, _ in corpus.dated)


def _today_observed(view: View) -> date | None:
    texts = (call.result.text for call in view.spoken.calls if call.result is not None and not call.result.error)
    return next((day for text in texts if (day := today_in(text)) is not None), None)
