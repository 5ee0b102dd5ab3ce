"""What a request can be answered with instead of a reply, in OpenAI's shape.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from typing import Any

from weightpath.errors import BadRequest, WeightpathError, printable
from weightpath.serve.worker import QueueFull, ShuttingDown

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An HTTP status with its body."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {
            "error": {
                "message": printable(message, 1000), "type": kind, "param": param, "code": code,
            }
        }  # fmt: skip


def api_error(error: Exception) -> ApiError:
    """Any exception as an answer; what is not of ours says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return ApiError(400, str(error))
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), None, "queue_full", "rate_limit_error", headers)
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error), None, "shutting_down", "server_error")
    if isinstance(error, WeightpathError):
        return ApiError(500, str(error), None, None, "server_error")
    return ApiError(500, "the engine failed; its log says how", None, None, "server_error")
