"""The cycle's stations, one module each: plain async functions of a context and ids, idempotent, kept in the store."""
