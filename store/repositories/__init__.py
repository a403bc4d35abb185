"""Queries and updates of the tables, one module per subject.

Functions that access the database take the session as first argument. They never commit:
``store.database.write_session`` does. Saving the same record twice is no error.
"""
