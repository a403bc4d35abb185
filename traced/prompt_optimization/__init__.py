"""Prompt optimization: a text at the end of the system prompt, evolved with ``gepa`` where an adapter would be
trained.
"""
