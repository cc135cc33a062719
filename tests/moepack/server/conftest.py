"""Skip the server's tests without its packages."""

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from arithmetic import bench  # noqa: F401
from server_fixtures import client, exact, options, plain, running, tokenizer  # noqa: F401
