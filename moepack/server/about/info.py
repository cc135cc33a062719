"""Routes that say what the server is and how it does: models, health, load, metrics, the page and its JSON."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moepack.server.batching.scheduler import Scheduler
from moepack.server.errors import ApiError
from moepack.shared.version import __version__

from .live_view import LiveView
from .metrics import Metrics
from .openapi import described
from .page import page

if TYPE_CHECKING:
    from moepack.runtime.serving import Serving

Aside = Callable[[Callable[[], Any]], Awaitable[Any]]
SHOWN = 128  # characters of a client's name for a model that an error repeats


class Info:
    """These routes, for one model that is called `name`."""

    def __init__(
        self,
        name: str,
        serving: Serving,
        scheduler: Scheduler,
        metrics: Metrics,
        view: LiveView,
        chats: bool,
        aside: Aside,
    ) -> None:
        """Set up; `chats` says whether the model has a chat template, and `aside` runs slow work off the event loop."""
        self._name, self._serving, self._scheduler, self._chats = name, serving, scheduler, chats
        self._metrics, self._view, self._aside = metrics, view, aside
        self._began = int(time.time())
        self.routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/load", self._load),
            Route("/live", self._live),
            Route("/metrics", self._text),
            Route("/openapi.json", self._openapi),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
        ]

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; None means this one. Raises ApiError."""
        if name not in (None, self._name):
            why = f"the model {str(name)[:SHOWN]!r} is not here: {self._name!r} is"
            raise ApiError(404, why, "model", "model_not_found")

    async def _page(self, request: Request) -> Response:
        return page()

    async def _health(self, request: Request) -> Response:
        versions, answers = self._serving.health(), self._scheduler.health()
        good = bool(versions["ok"] and answers["ok"])
        found = {"status": "ok" if good else "failing", "versions": versions, "answers": answers}
        return JSONResponse(found, 200 if good else 503)

    async def _load(self, request: Request) -> Response:
        """Answer how busy the server is, for balancers; `server_load` is vLLM's name."""
        return JSONResponse(load_of(self._scheduler), headers=FRESH)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({**await self._aside(self._view), "chats": self._chats}, headers=FRESH)

    async def _text(self, request: Request) -> Response:
        made = await self._aside(self._metrics.text)
        return Response(made, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(await self._aside(lambda: described(self._name)))

    def _described(self) -> dict[str, object]:
        most = self._scheduler.most_tokens
        context = {} if most is None else {"max_model_len": most}
        return {
            "id": self._name, "root": self._name, "object": "model", "created": self._began,
            "owned_by": f"moepack {__version__}", **context,
        }  # fmt: skip

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return JSONResponse(self._described())


FRESH = {"cache-control": "no-store"}


def load_of(scheduler: Scheduler) -> dict[str, int]:
    """Return a server's load: running and waiting requests, and the limits of both."""
    running, waiting, limits = scheduler.running, scheduler.waiting, scheduler.limits
    return {
        "server_load": running + waiting, "running": running, "waiting": waiting,
        "max_sequences": limits.sequences, "max_waiting": limits.waiting,
    }  # fmt: skip
