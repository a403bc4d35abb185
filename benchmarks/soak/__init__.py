"""Long runs of ``traced serve`` under traffic, promotions, rollbacks and SIGKILL: one router, or two on one store."""
