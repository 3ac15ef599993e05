"""The application: its routes and its layers."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, Mapping

import xserv
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .auth import Caller
from .chat import chat_completions
from .completions import completions
from .errors import ApiError
from .limits import RequestLimits, header_of
from .logs import RequestLog
from .observe import Observed
from .page import Page
from .requests import check_model
from .responses import JsonResponse
from .settings import Settings
from .state import State
from .tokens import detokenize, tokenize

PATHS = frozenset(
    (
        "/", "/health", "/metrics", "/tokenize", "/detokenize",
        "/v1/models", "/v1/chat/completions", "/v1/completions",
    )
)  # fmt: skip


_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}

Handler = Callable[[Request], Awaitable[Response]]


def _refusal(scope: Scope, error: ApiError) -> Response:
    scope.get("xserv.log", {})["error"] = error.code or error.kind
    return error.response()


class Posts:
    """The innermost layer: calls the endpoints that generate. FastAPI's way to them from here, with its exit stacks and
    dependencies, takes several times as long as its way to here. They are routes as well, for what this layer does not
    know: other methods, slashes at the end, an application that is part of another."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            handler = self._handlers.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
        except ApiError as error:
            response = _refusal(scope, error)
        await response(scope, receive, send)


def create_app(model: xserv.Model, settings: Settings) -> FastAPI:
    """Makes an ASGI application that serves a model. The model stays open, for whoever opened it to close.

    app.state.server is the State, whose refuse_new() and end_all() end a server's work in good order.
    """
    if not settings.model_names:
        raise ValueError("settings.model_names is empty: the model needs a name")
    state = State(model, settings)
    log = RequestLog() if settings.log_requests else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            state.refuse_new()
            state.end_all()
            if log is not None:
                log.close()

    layers = [
        Middleware(Observed, metrics=state.metrics, paths=PATHS, log=log),
        Middleware(RequestLimits, max_body_bytes=settings.max_body_bytes, allowed_hosts=settings.allowed_hosts),
    ]
    if settings.cors_origins:
        layers.insert(
            1,
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            ),
        )
    handlers = _handlers(state)
    layers.append(Middleware(Posts, handlers=handlers))
    app = FastAPI(
        title="xserv",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=layers,
        # FastAPI's own, which would look at every request for who has asked for it. Earlier versions take no notice.
        telemetry=None if "opentelemetry.sdk" in sys.modules else _NO_TELEMETRY,
    )
    app.state.server = state

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _refusal(request.scope, error)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        headers = error.headers
        if error.status_code == 404:
            return ApiError(404, "there is nothing at this path", code="not_found").response()
        if error.status_code == 405:
            found = ApiError(405, f"this path does not take {request.method}", code="method", headers=headers)
            return found.response()
        return ApiError(error.status_code, str(error.detail), headers=headers).response()

    _add_routes(app, state)
    for path, handler in handlers.items():
        app.post(path)(handler)
    if settings.page is not None and settings.page.is_file():
        page = Page(settings.page)

        @app.get("/")
        async def the_page() -> Response:
            return page.response()

    return app


def _caller_of(state: State, request: Request) -> Caller:
    caller = state.keys.caller(header_of(request.scope, b"authorization"))
    if caller.name is not None:
        request.scope.get("xserv.log", {})["key"] = caller.name
    return caller


def _handlers(state: State) -> Dict[str, Handler]:
    """The endpoints that generate, by their paths."""

    async def chat(request: Request) -> Response:
        return await chat_completions(state, request, _caller_of(state, request))

    async def complete(request: Request) -> Response:
        return await completions(state, request, _caller_of(state, request))

    return {"/v1/chat/completions": chat, "/v1/completions": complete}


def _add_routes(app: FastAPI, state: State) -> None:
    def describe(name: str) -> Dict[str, Any]:
        context = state.model.info.max_context_tokens
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "xserv",
            "max_model_len": context,
        }

    @app.get("/health")
    async def health() -> Response:
        is_leaving = state.admission.is_closed
        return JsonResponse({"status": "shutting down" if is_leaving else "ok"}, 503 if is_leaving else 200)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _caller_of(state, request)
        return JsonResponse({"object": "list", "data": [describe(name) for name in state.settings.model_names]})

    # A name may have slashes.
    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        _caller_of(state, request)
        check_model(name, state.settings.model_names)
        return JsonResponse(describe(name))

    @app.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        _caller_of(state, request)
        return JsonResponse(await tokenize(state, request))

    @app.post("/detokenize")
    async def text_of(request: Request) -> Response:
        _caller_of(state, request)
        return JsonResponse(await detokenize(state, request))
