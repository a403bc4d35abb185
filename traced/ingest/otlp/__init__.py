"""The receiver of spans: LLM calls that OpenTelemetry's senders have seen, recorded like the router's own traffic."""
