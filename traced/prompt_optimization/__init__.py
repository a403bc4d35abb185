"""Prompt optimization: evolve a text at the end of the system prompt with ``gepa``, as an alternative to an adapter."""
