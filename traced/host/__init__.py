"""Living on a host: one instance per data directory, signals, the service manager, its unit, logs."""
