"""Health, metrics, the page and its JSON."""

import base64
import hashlib
import json
import re
import time
import urllib.request

import pytest
from server_fixtures import NAME, ask
from support import PATIENCE

from moepack.shared.palette import PARTS, VERSIONS, colour

PROMPT = "The history of"


def fetch(running, path):
    with urllib.request.urlopen(running.url + path, timeout=PATIENCE) as answer:
        return answer.headers, answer.read()


def state(running):
    """The page's JSON, made anew."""
    running.idle()
    time.sleep(0.3)
    return json.loads(fetch(running, "/live")[1])


def test_live(running):
    """Every number equals that of the model or the budget, before and after an answer."""
    before = state(running)
    ask(running.url, PROMPT, max_tokens=10, ignore_eos=True)
    after = state(running)
    serving = running.model.moepack
    assert after["model"] == NAME and after["policy"].startswith("hotness") and after["packed"] is True
    shape = [len(row) for row in after["placed"]]
    assert shape == [16] * 4 == [len(row) for row in after["heat"]] and len(after["layers"]) == 4
    assert {after["kinds"][n] for row in after["placed"] for n in row} == set(after["kinds"])
    # 3 tokens of the prompt and 9 of the answer were read (the last one was not), each by two experts in every layer
    more = [sum(b) - sum(a) for a, b in zip(before["heat"], after["heat"], strict=True)]
    assert more == [(3 + 9) * 2] * 4
    counts = (("generated_tokens", 10), ("prompt_tokens", 3), ("finished", 1), ("first_tokens", 1))
    for name, count in counts:
        assert after["totals"][name] - before["totals"][name] == count
    assert 0 < after["totals"]["first_seconds"] - before["totals"]["first_seconds"] < PATIENCE
    assert after["moves"] is True and after["colours"].items() >= PARTS.items()
    assert {kind: after["colours"][kind] for kind in after["kinds"]} == {kind: colour(kind) for kind in after["kinds"]}
    budget = after["budget"]
    assert budget["total"] == serving.budget_bytes and budget["reserved"] <= budget["peak"] <= budget["total"]
    assert sum(budget["parts"].values()) == pytest.approx(budget["reserved"], abs=200_000)  # versions change meanwhile
    assert budget["kv_used"] == 0 and after["running"] == after["waiting"] == 0 and after["chats"] is True


def test_health(running, monkeypatch):
    assert json.loads(fetch(running, "/health")[1])["status"] == "ok"
    monkeypatch.setattr(running.server.scheduler, "_error", "OSError: the disk is gone")
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(running, "/health")
    assert caught.value.code == 503 and json.load(caught.value)["status"] == "failing"


def test_the_page_needs_nothing_from_elsewhere(running):
    headers, page = fetch(running, "/")
    policy, text = headers["content-security-policy"], page.decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for tag in ("script", "style"):
        inner = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'" in policy
    assert not re.findall(r"https?://|src=|innerHTML|\son\w+=|style=", text) and text.count("<script") == 1
    script = text.split("<script>")[1]
    assert not [shade for shade in VERSIONS.values() if shade in script], "the palette's colours come from /live"
    assert len(page) < 23_000 and headers["x-content-type-options"] == "nosniff"
