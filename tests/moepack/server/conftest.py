"""Where the server's own packages are not installed, its tests are skipped."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from server_fixtures import client, exact, options, plain, running, tokenizer  # noqa: F401
