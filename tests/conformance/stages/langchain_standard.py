"""LangChain's standard tests of its OpenAI chat model: those of a model that reads and writes text and calls tools.

Run as a script, pytest runs this file and each test's outcome is a case. Images, audio and documents are not asked for:
the class says that the model does not have them.
"""

import sys

import pytest
from cases import MODEL, URL, say
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

# The client keeps its connections from test to test: so must the loop stay.
LOOP = (
    "--asyncio-mode=auto", "-o", "asyncio_default_test_loop_scope=session",
    "-o", "asyncio_default_fixture_loop_scope=session",
)  # fmt: skip


class TestServed(ChatModelIntegrationTests):
    """The served model."""

    @property
    def chat_model_class(self):
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self):
        """How it is made."""
        given = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 120}
        return {**given, "max_tokens": 300, "seed": 1, "temperature": 0.5, "stream_usage": True}

    @property
    def supports_json_mode(self):
        """`response_format` is there."""
        return True


class Outcomes:
    """A plug-in that says each test's outcome as a case."""

    def pytest_runtest_logreport(self, report):
        """Say a test's outcome, or its fixture's where that failed."""
        if (report.when == "call" and not report.skipped) or report.failed:
            why = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else str(report.longrepr)
            say(report.nodeid.split("::")[-1], report.passed, "" if report.passed else why.split("\n")[0][:300])


if __name__ == "__main__":
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    # 0: all passed, 1: some failed, which Outcomes has said; else pytest itself did.
    sys.exit(pytest.main([*options, *LOOP, __file__], plugins=[Outcomes()]) not in (0, 1))
