"""Errors that clients see, in the shapes of OpenAI and Anthropic."""

from __future__ import annotations


class ApiError(Exception):
    """A refused request: HTTP status, message with the remedy, field (`messages[0].content`), code for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """The error as JSON."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """The error as JSON in Anthropic's shape."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def too_long(message: str, param: str | None = None) -> ApiError:
    """Make the error for a prompt or an answer that does not fit."""
    return ApiError(400, message, param, "context_length_exceeded")


def prompt_too_long(prompt: int, most: int, context: str) -> ApiError:
    """Make the error for a prompt of too many tokens, in the words by which clients know it and shorten their prompt.

    Claude Code looks for "prompt is too long: N tokens > M maximum", others for "this model's maximum context length".
    """
    sizes = f"{prompt} tokens > {most} maximum"
    return too_long(f"prompt is too long: {sizes} (this model's maximum context length is {context})")


def failed(message: str) -> ApiError:
    """Return the ApiError for a request that failed because of an error in the server."""
    return ApiError(500, message, None, "internal_error")


def not_finite(message: str) -> ApiError:
    """Make the error for a request whose logits are NaN or infinite."""
    return ApiError(500, message, None, "logits_not_finite")


def stopping(message: str = "this server is stopping") -> ApiError:
    """Make the error for a request that a stopping server refuses."""
    return ApiError(503, message, None, "stopping")


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """Make the error for an invalid field."""
    return ApiError(400, f"{param}: {message}", param, code)
