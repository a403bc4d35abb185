"""Errors of serving.

    TracedError
    └── ServingError
        ├── ModelError            a model directory is missing, incomplete or cannot be loaded
        ├── TemplateError         the chat template does not allow token-exact conversations
        ├── RoutingPromptError    labels and tokenizer do not fit the routing prompt
        ├── RouterFitError        too few examples to fit a router
        ├── RouterFileError       a router file is missing or holds no fitted router
        ├── EmbeddingsError       a server offers no embeddings for the fitted router
        ├── RequestError          the request is invalid; a repetition gives the same error (HTTP 4xx)
        │   ├── UnknownModelError     no such base or adapter (404)
        │   └── ContextLengthError    prompt and completion do not fit the context (400)
        └── EngineError           the engine failed or does not answer; the request may be repeated (HTTP 5xx)
            ├── EngineStartError      the engine's process ended or did not answer before it was ready
            └── OverloadedError       the engine refuses requests for the moment (408, 425, 429)

An ``EngineError`` is an infrastructure outcome of an episode, never a reward of 0.
"""

from traced.core.errors import TracedError


class ServingError(TracedError):
    """The base class of serving errors."""


class ModelError(ServingError):
    """The model's files are missing, incomplete or unreadable."""


class TemplateError(ServingError):
    """The tokenizer's chat template cannot be continued token by token."""


class RoutingPromptError(ServingError):
    """The routing prompt cannot be built for these options or this tokenizer."""


class RouterFitError(ServingError):
    """There are too few examples to fit a router."""


class RouterFileError(ServingError):
    """A router file is missing or holds no fitted router."""


class EmbeddingsError(ServingError):
    """A server offers no embeddings for the fitted router."""


class RequestError(ServingError):
    """The request is invalid; a repetition gives the same error."""


class UnknownModelError(RequestError):
    """No base model or adapter of that name is loaded."""


class ContextLengthError(RequestError):
    """The prompt leaves no room for a completion in the model's context."""


class EngineError(ServingError):
    """The engine failed or did not answer."""


class EngineStartError(EngineError):
    """The engine's process did not become ready."""


class OverloadedError(EngineError):
    """The engine refuses the request for the moment.

    Args:
        retry_after_s: Seconds after which the engine allows a repetition; 0 if it states none.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
