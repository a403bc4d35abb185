"""The outcome of a conversation: people's feedback, else a rule file, else a judge, else unknown.

Every verdict is a row of feedback in the store with its reason and its author. A person's word counts more than a rule,
and a rule more than the judge, whichever came first; what cannot be decided stays unknown, which is not a failure.
"""
