"""The stages of a cycle, one module each: idempotent async functions of a context and ids."""
