"""How a stage's script says what it found: a line a case, at once, so that a crash later loses none."""

import json
import os
import traceback
from pathlib import Path

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
BUNDLE, BIN = os.environ["CONFORMANCE_BUNDLE"], Path(os.environ["CONFORMANCE_BIN"])
_OUT = Path(os.environ["CONFORMANCE_OUT"])


def say(name, ok, why=""):
    """Write down one case; `why` is what went wrong."""
    with _OUT.open("a") as out:
        out.write(json.dumps({"name": name, "ok": ok, "why": why}) + "\n")


def case(function, named=None):
    """Run a function as the case of its name: it passes if it raises nothing. A decorator that runs at once."""
    name = (named or function.__name__).replace("_", " ").strip()
    try:
        function()
    except Exception as error:
        traceback.print_exc()
        say(name, False, f"{type(error).__name__}: {error}".split("\n")[0][:300])
    else:
        say(name, True)
