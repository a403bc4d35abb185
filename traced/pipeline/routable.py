"""Which failures a router could have avoided: those whose opening says that another model should answer.

That another live model solves a task in one replay may be luck, and an opening need not tell. So a classifier of the
kind that routes is fitted as the next router would be: on the openings of the adapters' environments, and on the
cycle's conversations, each with the model that answered it well or that solves its task. It predicts each conversation
from a fit without its fold; equal openings, such as trials of one task, are in one fold. A solver counts only where it
is predicted, and only if at least half of what is predicted for it is right: a router that took more from what works
would not pass its gate.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from store.types import Outcome, Trajectory, opening_messages
from traced.inference.errors import EmbeddingsError, RouterFitError
from traced.pipeline.context import Context
from traced.routing.hidden_state import fit_classifier, routed_text

FOLDS = 10
PRECISION = 0.5
Embedding = Sequence[float]
Example = tuple[str, str]  # an opening text, and the model that should serve it


async def routable_solvers(
    context: Context,
    trajectories: Sequence[Trajectory],
    answered_by: Mapping[str, str],
    solvers: Mapping[str, Sequence[str]],
    environments: Sequence[Example] = (),
) -> dict[str, list[str]]:
    """Return of each failure's solvers those that a router could have precise; all of them without embeddings.

    Args:
        trajectories: The cycle's judged conversations.
        answered_by: The model that answered each of them.
        solvers: The models that solve the task of each failure, without the live system itself.
        environments: The openings of the adapters' environments.
    """
    counts = Counter(model for models in solvers.values() for model in models)
    examples: list[tuple[str, str]] = []  # id, right model
    for row in trajectories:
        if row.outcome is Outcome.SUCCESS:
            examples.append((row.id, answered_by[row.id]))
        elif models := solvers.get(row.id):
            examples.append((row.id, min(models, key=lambda model: (-counts[model], model))))
    rows = {row.id: row for row in trajectories}
    texts = [routed_text(opening_messages(rows[key].messages)) for key, _ in examples]
    try:
        source = await context.embedding_source()
        # An engine without embeddings refuses any request for them, which only this call tells from other errors.
        await source.identity()
        embeddings = await source.embed([*texts, *(text for text, _ in environments)])
    except EmbeddingsError:
        return {key: list(models) for key, models in solvers.items()}
    labels = [*(model for _, model in examples), *(model for _, model in environments)]
    predicted = dict(zip((key for key, _ in examples), predictions(embeddings, labels, texts), strict=True))
    right_models = {key: [model, *solvers.get(key, ())] for key, model in examples}
    is_right = {key: predicted[key] in right_models[key] for key in predicted}
    totals, hits = Counter(predicted.values()), Counter(predicted[key] for key in predicted if is_right[key])
    precise = {model for model, total in totals.items() if hits[model] >= PRECISION * total}
    return {
        key: [model for model in models if model == predicted.get(key) and model in precise]
        for key, models in solvers.items()
    }


def predictions(embeddings: Sequence[Embedding], models: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return the model that a classifier predicts for each of the first examples after a fit without its fold.

    It is "" where no classifier can be fitted.

    Args:
        embeddings: One vector per example.
        models: The right model for each.
        groups: Of the examples to predict; those of one group are in one fold. The other examples are in every fit.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    folds = [places[group] % FOLDS for group in groups]
    results = [""] * len(groups)
    for fold in range(FOLDS):
        inside = [index for index in range(len(models)) if index >= len(groups) or folds[index] != fold]
        try:
            classifier = fit_classifier(
                [embeddings[index] for index in inside], [models[index] for index in inside], base_digest=""
            )
        except RouterFitError:
            continue
        for index in [index for index in range(len(groups)) if folds[index] == fold]:
            logprobs = classifier.logprobs(embeddings[index])
            results[index] = max(logprobs, key=lambda model: logprobs[model])
    return results
