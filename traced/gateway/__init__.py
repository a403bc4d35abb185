"""The gateway that agents connect to: an OpenAI-compatible endpoint in front of the engines."""
