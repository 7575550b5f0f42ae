"""POST /v1/query, GET /health."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from ragcache.answer import Answer
from ragcache.errors import QuestionError, RagCacheError, SettingsError
from ragcache.pipeline import RagCache
from ragcache.server.schemas import Health, Problem, QueryRequest
from ragcache.stream import AnswerStream

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(cache: RagCache) -> FastAPI:
    """The application for one opened store.

    Handlers are plain functions, so each runs in a worker thread and the event loop stays free.
    """
    app = FastAPI(title="ragcache", description="Answers from documents whose prefill is already done.")

    @app.exception_handler(RagCacheError)
    def on_error(request: Request, error: RagCacheError) -> JSONResponse:
        status = 400 if isinstance(error, QuestionError | SettingsError) else 503
        return _problem(status, type(error).__name__, str(error))

    @app.exception_handler(RequestValidationError)
    def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _problem(422, "ValidationError", f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    def on_refused(request: Request, error: HTTPException) -> JSONResponse:
        return _problem(error.status_code, "HTTPException", f"{request.method} {request.url.path}: {error.detail}")

    @app.exception_handler(Exception)
    def on_fault(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback; the client has no use for it.
        return _problem(500, "InternalError", "the server failed on this request; its log says why")

    @app.post("/v1/query", response_model=Answer, responses={400: {"model": Problem}, 503: {"model": Problem}})
    def query(request: QueryRequest) -> Any:
        """Answer a question from the store; with `stream`, as server-sent events."""
        stream = cache.stream(request.question, **request.options())
        if not request.stream:
            return stream.answer
        return StreamingResponse(_events(stream), media_type="text/event-stream", headers=SSE_HEADERS)

    @app.get("/health")
    def health() -> Health:
        """Whether questions can be answered, and from how much."""
        counts = cache.store.catalog.counts()
        return Health(model=cache.settings.model, documents=counts["documents"], chunks=counts["chunks"])

    return app


def _events(stream: AnswerStream) -> Iterator[str]:
    """Sources first, then text as it comes, then the whole answer, then `[DONE]`.

    The status went out with the first byte, so an error now can only be an event of its own.
    """
    try:
        yield _event({"type": "sources", "sources": [source.model_dump() for source in stream.sources]})
        for piece in stream:
            yield _event({"type": "text", "text": piece})
        yield _event({"type": "answer", **stream.answer.model_dump(mode="json")})
    except RagCacheError as error:
        yield _event({"type": "error", "error": type(error).__name__, "message": str(error)})
    except Exception:  # raised again: whoever reads the stream must learn that it broke off, the log why
        yield _event({"type": "error", "error": "InternalError", "message": "the server failed; its log says why"})
        raise
    finally:
        stream.close()
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _problem(status: int, error: str, message: str) -> JSONResponse:
    return JSONResponse(Problem(error=error, message=message).model_dump(), status_code=status)
