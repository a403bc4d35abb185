"""Read LLM calls and feedback from OpenTelemetry requests; ``traced.gateway.otlp_receiver`` records them."""
