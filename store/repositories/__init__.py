"""Plain functions on the tables, one module per subject: a session first, ``store.types`` and ``store.records`` after.

Saving the same thing twice is no error anywhere. Nothing commits here: ``store.database.session`` does.
"""
