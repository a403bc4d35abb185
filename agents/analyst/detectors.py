"""Detectors of the builtin analyst, one per capability of its catalogue.

A detector decides whether one conversation needed the capability and, if so, whether the agent exercised or lacked it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

from agents.analyst.claims import claims
from agents.analyst.corpus import Corpus, error_kind, retried
from agents.analyst.intents import Request, refusals
from agents.analyst.language import (
    RETRACTION,
    identifiers,
    last_mention,
    related,
    resolve,
    stem,
    today_in,
    words,
)
from agents.analyst.preconditions import Link, satisfied
from agents.analyst.solved_trials import Deviations, Trial, nearest_deviations
from agents.analyst.states import decisions
from agents.analyst.tools import ToolKind, fits_schema
from agents.analyst.values import ISO_DATE, is_date, leaves
from agents.analyst.view import Pick, View
from agents.transcript import Call
from store.types import Verdict

# Numbers up to this are counts, which need no source.
_MAX_COUNT = 10
_IMPLICIT_CHOICES = frozenset({"yes", "no", "true", "false", "none"})
_MARGIN = 0.5


@dataclass(frozen=True)
class Finding:
    """A verdict and the message that decided it (None for NA)."""

    verdict: Verdict
    index: int | None = None


NOT_NEEDED = Finding(Verdict.NA)


def exercised_at(index: int) -> Finding:
    """Return the finding that the capability was needed and exercised, decided by message ``index``."""
    return Finding(Verdict.PRESENT, index)


def lacking_at(index: int) -> Finding:
    """Return the finding that the capability was needed and not exercised, decided by message ``index``."""
    return Finding(Verdict.LACKING, index)


def detect_supported_amounts(view: View, corpus: Corpus) -> Finding:
    """Decide whether the numbers of each write were stated, observed or computed before (supported amounts).

    Needed if a write carries a number above 10. Lacking if such a number appeared in no earlier user message,
    observation or prompt.
    """
    amounts = [
        (call.index, value)
        for call in corpus.writes(view)
        for _, value in leaves(call.arguments or {})
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > _MAX_COUNT
    ]
    for index, value in amounts:
        number = int(value) if float(value).is_integer() else value
        if not view.grounded(number, index):
            return lacking_at(index)
    return exercised_at(amounts[-1][0]) if amounts else NOT_NEEDED


def detect_date_reasoning(view: View, corpus: Corpus) -> Finding:
    """Decide whether a relative date ("in 3 days") became the right date (date reasoning).

    Needed if the user gave a relative date, today's date is known, and a call with a date was made (a write, if the
    target has writes with dates). Valid dates are the readings of the user's words, the dates that the user wrote out,
    and the dates in the result of a call with a valid date. Lacking if the first call with a date, or a write with a
    date, has no valid date.
    """
    today = today_in(view.transcript.system) or _today_observed(view)
    if today is None:
        return NOT_NEEDED
    dated_calls = [(call, days) for call in view.transcript.calls if (days := _dates(call, corpus))]
    write_calls = [call for call, _ in dated_calls if corpus.kinds[call.name] is ToolKind.WRITE]
    if not dated_calls or (_writes_dates(corpus) and not write_calls):
        return NOT_NEEDED
    valid_dates = _intended_dates(view, today, dated_calls[0][0].index)
    if not valid_dates:
        return NOT_NEEDED
    for position, (call, days) in enumerate(dated_calls):
        if (position == 0 or call in write_calls) and not days & (
            valid_dates | _intended_dates(view, today, call.index)
        ):
            return lacking_at(call.index)
        if days & valid_dates and call.result is not None:
            valid_dates |= {day for _, value in leaves(call.result.value) for day in ISO_DATE.findall(str(value))}
    return exercised_at(dated_calls[-1][0].index)


def _intended_dates(view: View, today: date, index: int) -> set[str]:
    """Return the readings of the user's relative dates and the dates written out; empty without a relative date."""
    text = "\n".join(message.text for message in view.transcript.user_before(index))
    relative = {day.isoformat() for day in resolve(text, today)}
    return relative | set(ISO_DATE.findall(text)) if relative else set()


def _dates(call: Call, corpus: Corpus) -> set[str]:
    return {
        str(value)
        for path, value in leaves(call.arguments or {})
        if (call.name, path) in corpus.date_parameters and is_date(value)
    }


def _writes_dates(corpus: Corpus) -> bool:
    return any(corpus.kinds[tool] is ToolKind.WRITE for tool, _ in corpus.date_parameters)


def _today_observed(view: View) -> date | None:
    texts = (call.result.text for call in view.transcript.calls if call.result is not None and not call.result.error)
    return next((day for text in texts if (day := today_in(text)) is not None), None)


def detect_error_recovery(view: View, corpus: Corpus) -> Finding:
    """Decide whether the agent recovered from the errors of tools (error recovery).

    Needed if a tool answered with an error from which most successful conversations recovered; after other errors it
    may be right to give up. Exercised if, after each such call, the tool succeeded or the agent handed over after a
    different call. Lacking if the agent gave up or only repeated a failed call.
    """
    failed = [
        call
        for call in view.transcript.calls
        if call.result is not None and call.result.error and error_kind(call) in corpus.recoverable
    ]
    if not failed:
        return NOT_NEEDED
    ends = [(call, _recovery(call, view, corpus)) for call in failed]
    unresolved = [call for call, way_out in ends if way_out is None]
    if unresolved:
        return lacking_at(min(unresolved[-1].index + 2, view.transcript.length - 1))
    return exercised_at(max(way_out.index for _, way_out in ends if way_out is not None))


def _recovery(failed: Call, view: View, corpus: Corpus) -> Call | None:
    """Return the later successful call of the same tool, else a hand-over after a different call, else None."""
    retry = retried(failed, view)
    if retry is not None:
        return retry
    later = [call for call in view.transcript.calls if call.index > failed.index]
    different = [call for call in later if (call.name, call.raw) != (failed.name, failed.raw)]
    handoffs = corpus.handoffs(view)
    return next((handoff for handoff in handoffs if any(call.index < handoff.index for call in different)), None)


def detect_multi_step_completion(view: View, corpus: Corpus) -> Finding:
    """Decide whether each of several requests was done, answered or declined (multi-step completion).

    Needed if the user made two or more requests; a retracted request does not count. A hand-over serves every request
    before it, a refusal the refused one. A write request is served by a call of its tool on its object, or on no object
    of another request for that tool; or by another write on its object, if no other request is for that write or names
    that object. A question is served by a call on its object, by an answer that names the object, or by any reply if
    the user's message holds no other request. Where objects have codes, a request that names none cannot be followed
    to a call and is not judged.
    """
    requests = corpus.intents.requests(view)
    if not corpus.intents.names:
        requests = [request for request in requests if request.objects]
    if len(requests) < 2:
        return NOT_NEEDED
    unserved = [request for request in requests if not _is_served(request, requests, view, corpus)]
    pending = [request for request in unserved if not _is_retracted(request, view)]
    if pending:
        return lacking_at(view.transcript.agent[-1].index if view.transcript.agent else pending[0].index)
    if len(requests) - len(unserved) < 2:
        return NOT_NEEDED
    return exercised_at(max((call.index for call in view.transcript.calls), default=requests[-1].index))


def _is_served(request: Request, requests: Sequence[Request], view: View, corpus: Corpus) -> bool:
    handed_over = any(call.index > request.index for call in corpus.handoffs(view))
    if handed_over or any(True for _ in refusals(view, request)):
        return True
    if request.tool is None:
        return any(_names_object(call, request) for call in view.transcript.calls) or _is_answered(
            request, requests, view
        )
    if request.tool == "":
        writes = corpus.writes(view)
        return any(call.index > request.index and _names_object(call, request) for call in writes)
    other_requests = [other for other in requests if other is not request]
    return any(_fulfils(call, request, other_requests) for call in corpus.writes(view))


def _fulfils(call: Call, request: Request, other_requests: Sequence[Request]) -> bool:
    if call.index < request.index:
        return False
    if call.name == request.tool:
        return not request.objects or _names_object(call, request) or not _about_records(call, other_requests)
    belongs_elsewhere = any(other.tool == call.name or other.objects & request.objects for other in other_requests)
    return not belongs_elsewhere and _names_object(call, request)


def _about_records(call: Call, other_requests: Sequence[Request]) -> bool:
    """Return whether the call is on the object of another request for the same tool."""
    return any(other.tool == call.name and _names_object(call, other) for other in other_requests)


def _names_object(call: Call, request: Request) -> bool:
    return any(
        str(value) in request.objects or str(value).lower() in request.objects
        for _, value in leaves(call.arguments or {})
    )


def _is_answered(request: Request, requests: Sequence[Request], view: View) -> bool:
    """Return whether the agent named the object afterwards, or replied to a message with no other request."""
    is_only_request = not any(other.index == request.index for other in requests if other is not request)
    replies = [message for message in view.transcript.agent if message.index > request.index]
    return any(is_only_request or request.objects & identifiers(message.text) for message in replies)


def _is_retracted(request: Request, view: View) -> bool:
    return any(RETRACTION.search(message.text) for message in view.transcript.user if message.index > request.index)


def detect_call_precision(view: View, corpus: Corpus) -> Finding:
    """Decide whether every call fits its schema and takes its arguments from earlier text (tool-calling precision).

    Needed if a tool was called with arguments. Lacking if a call breaks its schema, or has a code that no earlier text
    contained or a choice that contradicts the user. Dates, choices among records, numbers and free text are not judged
    here, nor are tools that only compute or hand over.
    """
    calls = [
        call
        for call in view.transcript.calls
        if call.arguments != {} and corpus.kinds.get(call.name) not in (ToolKind.PURE, ToolKind.HANDOFF)
    ]
    for call in calls:
        if (
            not fits_schema(call, corpus.validators)
            or not _codes_are_grounded(call, view, corpus)
            or not _choices_agree(call, view, corpus)
        ):
            return lacking_at(call.index)
    return exercised_at(calls[-1].index) if calls else NOT_NEEDED


def _codes_are_grounded(call: Call, view: View, corpus: Corpus) -> bool:
    return all(
        view.grounded(value, call.index)
        for path, value in leaves(call.arguments or {})
        if (call.name, path) in corpus.copied_parameters and isinstance(value, str)
    )


def _choices_agree(call: Call, view: View, corpus: Corpus) -> bool:
    text = " \n ".join(message.text for message in view.transcript.user_before(call.index))
    for path, value in leaves(call.arguments or {}):
        choices = corpus.choices.get((call.name, path))
        if choices and value in choices and not _choice_agrees(str(value), choices, text):
            return False
    return True


def _choice_agrees(value: str, choices: Sequence[str], text: str) -> bool:
    """Return whether the user's words point to no other choice more clearly than to ``value``."""
    # The user need not say a yes-or-no choice: it follows from the request.
    if _IMPLICIT_CHOICES & set(choices):
        return True
    user_words = words(text)
    user_stems = [stem(word) for word in user_words]
    scores = {choice: _mention_score(choice, text, user_words, user_stems) for choice in choices}
    return max(scores.values()) - scores[value] < _MARGIN


def _mention_score(choice: str, text: str, user_words: Sequence[str], user_stems: Sequence[str]) -> float:
    """Return how clearly the text names a choice: 1 literally, 0.5 in part or by a related word, else 0."""
    if last_mention(text, choice) is not None:
        return 1.0
    parts = [stem(word) for word in words(choice)]
    if all(part in user_stems for part in parts):
        return 1.0
    if any(related(part, user_stem) for part in parts for user_stem in user_stems if len(user_stem) > 3):
        return 0.5
    is_suffix = any(
        len(word) >= 4 and len(part) > len(word) and part.endswith(word) for part in parts for word in user_words
    )
    return 0.5 if is_suffix else 0.0


def detect_precondition_verification(view: View, corpus: Corpus) -> Finding:
    """Decide whether the object was read before it was changed, or the change refused after a read.

    This is precondition verification; the preconditions are the links of ``agents.analyst.preconditions``. Not needed
    if no write with a precondition was attempted or refused after a read. A write that contradicts the content of the
    read is not detected.
    """
    writes = [(call, link) for call in view.transcript.calls for link in corpus.links if link.write_tool == call.name]
    for call, link in writes:
        if not satisfied(link, view.transcript.calls, call):
            return lacking_at(call.index)
    if writes:
        return exercised_at(writes[-1][0].index)
    requests = corpus.intents.requests(view)
    refusal_indices = [
        index for link in corpus.links if (index := _refusal_after_read(link, view, requests)) is not None
    ]
    return exercised_at(min(refusal_indices)) if refusal_indices else NOT_NEEDED


def _refusal_after_read(link: Link, view: View, requests: Sequence[Request]) -> int | None:
    read_indices = [call.index for call in view.transcript.calls if call.name == link.read_tool and call.succeeded]
    if not read_indices:
        return None
    write_requests = [request for request in requests if request.tool == link.write_tool]
    indices = [index for request in write_requests for index in refusals(view, request) if index > read_indices[0]]
    return min(indices, default=None)


def detect_policy_adherence(view: View, corpus: Corpus) -> Finding:
    """Decide whether writes were made and refused as the record's state demands (policy adherence).

    The rules are those of ``agents.analyst.states``. Not needed if no write with a rule was made or refused after a
    read of its record.
    """
    by_rule = [
        (row.index, row.obeys(rule))
        for rule in corpus.state_rules
        for row in decisions(view, rule.link, rule.field, corpus.kinds)
        if row.index is not None
    ]
    wrong = [index for index, is_right in by_rule if is_right is False]
    right = [index for index, is_right in by_rule if is_right]
    if wrong:
        return lacking_at(min(wrong))
    return exercised_at(max(right)) if right else NOT_NEEDED


def detect_repetition(view: View, corpus: Corpus) -> Finding:
    """Decide whether the agent repeated a tool call although nothing had changed (moving on).

    Needed if at least two calls were made. Lacking if a call repeats an earlier one with no successful write and no
    user message in between.
    """
    calls = view.transcript.calls
    if len(calls) < 2:
        return NOT_NEEDED
    user_indices = [message.index for message in view.transcript.user]
    last: dict[tuple[str, str], int] = {}
    changed = -1
    for call in calls:
        previous = last.get((call.name, call.raw))
        if (
            previous is not None
            and previous >= changed
            and not any(previous < index < call.index for index in user_indices)
        ):
            return lacking_at(call.index)
        last[call.name, call.raw] = call.index
        if corpus.kinds.get(call.name) is ToolKind.WRITE and call.succeeded:
            changed = call.index
    return exercised_at(calls[-1].index)


def detect_faithful_reports(view: View, corpus: Corpus) -> Finding:
    """Decide whether what the agent said about records is what the tools answered (faithful reports).

    Needed if the agent gave a value to a field of a record that it had read (``agents.analyst.claims``). Lacking if the
    tool's last answer has another value.
    """
    reports = list(claims(view.transcript, corpus.categories, corpus.kinds))
    wrong = [claim.index for claim in reports if not claim.is_true]
    if wrong:
        return lacking_at(wrong[0])
    return exercised_at(reports[-1].index) if reports else NOT_NEEDED


def detect_structured_reasoning(view: View, corpus: Corpus) -> Finding:
    """Decide whether the writes name the record that the user described (structured data reasoning).

    Needed if a write names a record that the user described rather than named. Lacking if a sibling fits the user's
    last words strictly better, or if a parameter that is usually filled with described records names no observed
    record. Of several writes by one tool on one object the last counts.
    """
    last = {(call.name, _object(call)): (call, picks) for call, picks in _writes(view, corpus)}
    verdicts = [
        (call.index, right) for call, picks in last.values() if (right := _chose_right(call, picks, corpus)) is not None
    ]
    for index, right in verdicts:
        if not right:
            return lacking_at(index)
    return exercised_at(verdicts[-1][0]) if verdicts else NOT_NEEDED


def _writes(view: View, corpus: Corpus) -> Iterator[tuple[Call, list[Pick]]]:
    for call, picks in zip(view.transcript.calls, view.picks, strict=True):
        if corpus.kinds.get(call.name) is ToolKind.WRITE:
            yield call, picks


def _chose_right(call: Call, picks: Sequence[Pick], corpus: Corpus) -> bool | None:
    """Return whether the described records were chosen well; None if the call chose none."""
    verdicts = [pick.right for pick in picks if pick.right is not None]
    verdicts += [False for pick in picks if not pick.observed and (call.name, pick.path) in corpus.described_parameters]
    return all(verdicts) if verdicts else None


def _object(call: Call) -> str:
    return str(next(iter((call.arguments or {}).values()), ""))


def detect_change_exactness(view: View, corpus: Corpus) -> Finding:
    """Decide whether the changes have the arguments that a solved trial of the same task used (change exactness).

    Needed if the conversation and its nearest solved trial made changes with a tool in common.
    """
    result = _from_solved_trial(view, corpus)
    if result is None or not (result.shared or result.changed):
        return NOT_NEEDED
    return lacking_at(result.changed[0].index) if result.changed else exercised_at(result.shared[-1].index)


def detect_change_completeness(view: View, corpus: Corpus) -> Finding:
    """Decide whether every change that a solved trial of the same task made was made (change completeness).

    Needed if the nearest solved trial made changes. In a task that no trial solved: needed if most of the other trials
    made a change, and lacking if this one made none. Decided by the first hand-over, else by the agent's last words.
    """
    changes, result = corpus.changes(view), _from_solved_trial(view, corpus)
    if result is not None:
        is_needed, is_lacking = bool(result.shared or result.changed or result.missing), bool(result.missing)
    elif any(trial.is_solved for trial in _trials(view, corpus)):
        return NOT_NEEDED
    else:
        peers = [trial for trial in _trials(view, corpus) if trial.trajectory_id != view.transcript.trajectory_id]
        is_needed, is_lacking = 2 * sum(bool(trial.changes) for trial in peers) > len(peers) > 1, not changes
    if not is_needed:
        return NOT_NEEDED
    return lacking_at(_closing_index(view, corpus)) if is_lacking else exercised_at(view.transcript.length - 1)


def detect_change_restraint(view: View, corpus: Corpus) -> Finding:
    """Decide whether the agent made no change that a solved trial of the same task did without (change restraint).

    Needed if another trial is solved, and this conversation or another trial made a change.
    """
    result = _from_solved_trial(view, corpus)
    if result is None or not (corpus.changes(view) or any(trial.changes for trial in _trials(view, corpus))):
        return NOT_NEEDED
    return lacking_at(result.extra[0].index) if result.extra else exercised_at(view.transcript.length - 1)


def _trials(view: View, corpus: Corpus) -> Sequence[Trial]:
    return corpus.trials.get(view.task, [])


def _from_solved_trial(view: View, corpus: Corpus) -> Deviations | None:
    return nearest_deviations(view.transcript.trajectory_id, corpus.changes(view), _trials(view, corpus))


def _closing_index(view: View, corpus: Corpus) -> int:
    handoffs = corpus.handoffs(view)
    if handoffs:
        return handoffs[0].index
    return view.transcript.agent[-1].index if view.transcript.agent else view.transcript.length - 1
