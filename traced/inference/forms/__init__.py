"""Other API forms as chat messages: OpenAI's Responses form and Anthropic's Messages form."""
