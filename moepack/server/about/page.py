"""The page: its HTML, which /live and, while the model loads, /health fill with numbers. Imports no torch."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.responses import HTMLResponse


def page(status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """Return the page."""
    from starlette.responses import HTMLResponse

    content, policy = _read()
    fixed = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    fixed |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return HTMLResponse(content, status, {**fixed, **(headers or {})})


@functools.cache
def _read() -> tuple[bytes, str]:
    """The page, and a content security policy that allows its one script and one style only."""
    content = files(__package__).joinpath("page.html").read_bytes()
    allowed = {}
    for tag in (b"script", b"style"):
        inner = content.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
        allowed[tag.decode()] = "'sha256-" + base64.b64encode(hashlib.sha256(inner).digest()).decode() + "'"
    return content, (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
