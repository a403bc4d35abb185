"""Queries and updates of the tables, one module per subject; every function takes a session as first argument.

Saving the same record twice is no error. Nothing here commits: ``store.database.write_session`` does.
"""
