"""A real service that is killed again and again, and what must hold afterwards (``python -m benchmarks.chaos``)."""
