"""`moepack serve`: listen, load a bundle, answer until a signal comes, finish running requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from moepack.pack.errors import InputError, MissingExtraError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.runtime.planning.sizes import parse_size
from moepack.shared.opening import read_template

from .options import UNLIMITED, WAYS, Limits, Options
from .own_sampling import check_choice, described

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp
    from transformers import PreTrainedTokenizerBase

    from moepack.runtime.served_model import ServedModel

    from .http.app import Server

KEY = "MOEPACK_API_KEY"
LAST = 5  # seconds for the answers of requests that the grace ends
SPARE_FILES = 512  # open files beside the connections
HELD = 4096  # tokens of KV cache reserved at loading if the policy cannot evict experts for it later
LEAST = 16  # tokens of prompt and answer that the budget must hold
# torch and oneDNN each keep compiled products of up to 1,024 shapes, and passes have any number of tokens: 180 MB after
# 900 passes of a small model, and still growing. With 128 each, memory stays constant.
COMPILED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


Shown = contextlib.AbstractContextManager[Callable[[int, int], None]]


def unseen(where: str) -> Shown:
    """Show nothing of a load."""
    return contextlib.nullcontext(lambda done, total: None)


@dataclass(frozen=True, slots=True)
class Serve:
    """The command's options, with sizes as typed; `load` says how to load the bundle."""

    bundle: str
    load: LoadOptions = DEFAULTS
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] | None = None
    name: str | None = None
    chat_template: Path | None = None
    system_messages: str = "join"
    generation_config: str = "auto"
    max_sequences: int = 32
    max_waiting: int = 256
    max_connections: int = 1024
    step_tokens: int = 256
    max_kv_tokens: int | None = None
    prefix_cache: str | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_size: str = "10GiB"
    max_prompt_tokens: int | None = None
    max_body: str = "4MiB"
    grace: float = 30.0
    access_log: bool = False
    cors_origin: Sequence[str] | None = None
    replicas: int = 1
    address: str | None = None


def serve(asked: Serve, say: Callable[[str], None], shown_by: Callable[[str], Shown] = unseen) -> None:
    """Serve until a signal comes. The port is open at once; until the model is loaded requests get 503.

    Args:
        say: receives the address once requests are answered.
        shown_by: makes a context from the same words at once, which receives the bytes read and in all.

    Raises:
        InputError: for invalid options, a bundle that cannot be loaded, or an address in use.
    """
    prepare()
    options = options_of(asked)
    with listening(asked.host, asked.port) as listener:
        from .http.front import Front

        where = f"{options.name} at {shown(asked.host, listener.getsockname()[1])}"
        told = [where]

        def load(held: contextlib.ExitStack, report: Callable[[int, int], None]) -> Server:
            with shown_by(where) as show:

                def both(done: int, total: int) -> None:
                    show(done, total)
                    report(done, total)

                server = held.enter_context(opened(asked, options, both))
                told.append(described(server.own))
                return server

        front = Front(options, load, lambda: say("; ".join(filter(None, told))))
        asyncio.run(run(front, listener, asked, front.begin))
        if front.error is not None:
            raise front.error


def stop_signals() -> list[signal.Signals]:
    """Return the signals at which running requests finish and serving ends.

    SIGHUP, the end of the terminal, is one of them unless it is ignored, as under nohup.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals inside the context. Only the main thread has signals: on others, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def prepare() -> None:
    """Bound the caches of torch and oneDNN. Call it before torch is imported.

    Raises:
        MissingExtraError: if a library that serving needs is missing.
    """
    for variable, count in COMPILED.items():
        os.environ.setdefault(variable, count)
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(str(error.name), "serve") from None


def options_of(asked: Serve) -> Options:
    """Turn the command's options into the server's.

    Raises:
        InputError: for an unreadable template or an invalid size.
    """
    template = read_template(asked.chat_template)
    path = Path(asked.bundle)
    limits = Limits(
        asked.max_sequences,
        asked.max_waiting,
        asked.step_tokens,
        prompt=asked.max_prompt_tokens or UNLIMITED,
        kv_tokens=asked.max_kv_tokens or UNLIMITED,
        kept_bytes=0 if asked.prefix_cache == "off" else parse_size(asked.prefix_cache),
    )
    most = parse_size(asked.max_body)
    assert most is not None
    name = asked.name or (path.resolve().name if path.exists() else asked.bundle)
    keys = tuple(filter(None, asked.api_key or ())) or tuple(filter(None, [os.environ.get(KEY)]))
    if asked.system_messages not in WAYS:
        raise InputError(f"--system-messages {asked.system_messages} is unknown: it is {', '.join(WAYS)}")
    check_choice(asked.generation_config)
    own = asked.generation_config == "auto"
    folder = asked.prefix_cache_dir
    if folder is not None and asked.prefix_cache == "off":
        raise InputError("--prefix-cache-dir keeps what --prefix-cache keeps in memory first: give one of them alone")
    room = parse_size(asked.prefix_cache_dir_size)
    assert room is not None
    return Options(
        name,
        asked.host,
        keys,
        most,
        limits,
        template,
        asked.system_messages,
        prefix_dir=folder,
        prefix_dir_bytes=room,
        own_sampling=own,
    )


@contextlib.contextmanager
def opened(asked: Serve, options: Options, report: Callable[[int, int], None] | None = None) -> Iterator[Server]:
    """Load the model, with `report` as in `moepack.load`, and yield its server.

    Raises:
        InputError: if the bundle cannot be loaded, or the budget leaves no room for a sequence.
    """
    from moepack.runtime.load import check_bundle
    from moepack.runtime.profile import check_writable, kept

    profile = asked.load.profile
    if profile is not None:
        check_writable(profile)
        if not Path(profile).exists():  # the first start with it
            asked = replace(asked, load=replace(asked.load, profile=None))
    check_bundle(asked.bundle, asked.load)  # finds errors before slow imports

    from .http.app import Server

    model, tokenizer = _load(asked, report)
    keeping = contextlib.nullcontext() if profile is None else kept(profile, model.moepack.bundle, model.moepack)
    with model.moepack, keeping:
        server = Server(model, tokenizer, options)
        if lacking := server.engine.lacks(LEAST):
            raise InputError(
                f"{asked.bundle}: beside the experts the budget does not hold a sequence of {LEAST} tokens: it lacks "
                f"{lacking} bytes: give a larger budget, or reserve tokens with --kv-tokens"
            )
        yield server


def _load(asked: Serve, report: Callable[[int, int], None] | None) -> tuple[ServedModel, PreTrainedTokenizerBase]:
    from transformers.utils import logging as hf_logging

    from moepack.families.tokenizer import load_tokenizer
    from moepack.runtime.load import load_bundle
    from moepack.runtime.planning.config import check_config
    from moepack.runtime.planning.exceeded import BudgetExceeded

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    check_config(asked.bundle)  # transformers reads the configuration for a tokenizer
    tokenizer = load_tokenizer(Path(asked.bundle))
    moves = not asked.load.in_budget or asked.load.parsed_policy().is_live
    options = asked.load.filled(kv_tokens=0 if moves else HELD, prefill_tokens=asked.step_tokens, all_logits=False)
    try:
        model = load_bundle(asked.bundle, options, report)
    except BudgetExceeded as error:
        if moves or asked.load.kv_tokens is not None:
            raise
        why = f"{HELD} tokens of KV cache are held back, because {options.policy} lets no expert make room: --kv-tokens"
        raise InputError(f"{error} ({why} changes that)") from None
    return model.eval(), tokenizer


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket and yield it; call this before the model is loaded, so that an address in use shows at once."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"{host} port {port}: {error.strerror or error}") from None
        yield listener


def shown(host: str, port: int) -> str:
    """Return the URL of a host and a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Application(Protocol):
    """The application that `run` serves."""

    @property
    def app(self) -> ASGIApp:
        """The application."""

    def start(self) -> None:
        """Begin to answer, on the event loop."""

    def stop(self) -> None:
        """Refuse new requests."""

    def close(self) -> None:
        """End the requests that still run, and release the application's resources. It may be called twice."""


async def run(
    server: Application, listener: socket.socket, asked: Serve, ready: Callable[[uvicorn.Server], None]
) -> None:
    """Answer on `listener` until uvicorn stops. `ready` receives uvicorn once it answers.

    Running requests then finish; those that still run after `asked.grace` seconds end with an error that says so.
    """
    import uvicorn

    from .http.guard import HEADERS, Bounded, patient, shared

    class Stopping(uvicorn.Server):
        """uvicorn's server. It starts and stops `server` too, and exits with 0 after a signal."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with super().capture_signals(), handling(stop_signals(), self.handle_exit):
                yield
                self._captured_signals.clear()  # otherwise uvicorn raises the signals again

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            server.start()
            await super().startup(sockets)
            ready(self)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            server.stop()
            ending = asyncio.create_task(end_after_grace())
            await super().shutdown(sockets)
            ending.cancel()

    async def end_after_grace() -> None:
        await asyncio.sleep(asked.grace)
        await asyncio.to_thread(server.close)

    _allow_files(asked.max_connections + SPARE_FILES)
    app = shared(Bounded(server.app, asked.max_connections), asked.cors_origin or ())
    config = uvicorn.Config(
        app,
        http=patient(asked.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=asked.access_log,
        timeout_keep_alive=int(HEADERS),
        h11_max_incomplete_event_size=32 << 10,
        timeout_graceful_shutdown=math.ceil(asked.grace) + LAST,
        server_header=False,
        backlog=1024,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    if asked.access_log:
        logging.getLogger("uvicorn.access").addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    await Stopping(config).serve([listener])
    await asyncio.to_thread(server.close)


def _allow_files(count: int) -> None:
    """Raise the number of files that this process may open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
