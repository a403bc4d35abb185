"""Whether a conversation that nobody scored went well: people's feedback, then a rule file, then a judge, else unknown.

Invariants: what a person said always counts more than a rule, and a rule more than the judge, whichever came first;
every verdict is a row of feedback in the store with its reason, so ``traced outcomes show`` can say who judged; what
cannot be decided stays unknown, which is never a failure.
"""
