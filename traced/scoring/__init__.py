"""Determine the outcome of a conversation: people's feedback, else a rule file, else a judge, else unknown.

Every verdict is a row of feedback in the store with its reason and its author. Feedback of a person takes precedence
over a rule, and a rule over the judge, whichever came first. What cannot be decided stays unknown, which is not a
failure.
"""
