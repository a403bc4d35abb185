"""The router that agents point at: an OpenAI-compatible endpoint in front of the engines."""
