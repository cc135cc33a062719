"""What moepack's commands give where packages are missing: `lacking.py FOLDER CHECKPOINT TEXT BUNDLE NAME...`.

For each NAME, that of a package or "all", a forked child makes the package impossible to import and then runs the
commands, so that transformers, too, finds it missing. It prints a line of JSON.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support import RTN, cli, forked, ok, tree

SERVE = ("h11", "prometheus_client", "starlette", "uvicorn")  # without which there is no server
# What moepack's extras bring, torch's wheels for CPUs leave out, and transformers imports where it finds it
ABSENT = (
    "datasets", "gptqmodel", "hqq", "llguidance", "lm_eval", "matplotlib", "optimum", "peft", "ray", "scipy", "sklearn",
    "torchao", "triton", "vllm",
)  # fmt: skip
PROMPT, TOKENS = "The history of", 5


def hide(names: Iterable[str]):
    """Let imports of packages fail, and `find_spec` find none."""
    for name in names:
        for loaded in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
            sys.modules[loaded] = None


def core(folder: Path, checkpoint: str, text: str, bundle: str) -> dict[str, Any]:
    """Run the commands that need no extra but the server's; what they print and make."""
    recipe = folder / "rtn.yaml"
    recipe.write_text(RTN)
    limit = ("--device-memory", "30MB")
    ok(cli("build", checkpoint, "-o", folder / "made", "--recipe", recipe, "--calibration", text, "-q"))
    ok(cli("export", bundle, "-o", folder / "plain", "--to", "checkpoint", "--bits", "4", "-q"))
    spoken = ok(cli("generate", bundle, "--policy", "static:w4", "--prompt", PROMPT, "--max-new-tokens", TOKENS))
    scored = ok(cli("eval", bundle, "--policy", "static:w4", "--data", text, "--samples", 2, "--length", 32, "--json"))
    return {
        "verify": ok(cli("verify", bundle)),
        "inspect": ok(cli("inspect", bundle)),
        "plan": json.loads(ok(cli("plan", bundle, *limit, "--json")))["per_layer"],
        "made": {name: hashlib.sha256(made).hexdigest() for name, made in tree(folder / "made" / "experts").items()},
        "exported": hashlib.sha256((folder / "plain" / "model.safetensors").read_bytes()).hexdigest(),
        "generate": spoken,
        "limited": ok(cli("generate", bundle, "--memory", "8GiB", "--prompt", PROMPT, "--max-new-tokens", TOKENS)),
        "eval": json.loads(scored)["perplexity"],
        "serve": answer(bundle),
    }


def answer(bundle: str, **more) -> str:
    """What a server of the bundle goes on with."""
    from served import complete

    from moepack.runtime.planning.options import LoadOptions

    return complete(bundle, LoadOptions(policy="static:w4"), PROMPT, TOKENS, **more)


def refusals(folder: Path, checkpoint: str, text: str, bundle: str) -> dict[str, Any]:
    """Run the commands that need an extra, without any; what they print on stderr."""
    from moepack.reports import doctor

    doctor._devices = lambda: [{"name": "a GPU"}]
    (table := folder / "table.parquet").touch()
    build = ("build", checkpoint, "-o", folder / "none", "-q", "--recipe")
    asked: dict[str, tuple[Any, ...]] = {
        "datasets": (*build, folder / "rtn.yaml", "--calibration", table),
        "matplotlib": ("inspect", bundle, "--plot", folder / "plot.png"),
        "ray": (*build, folder / "rtn.yaml", "--calibration", text, "--engine", "ray"),
        "replicas": ("serve", bundle, "--replicas", "2"),
        "lm_eval": ("eval", bundle, "--tasks", "any"),
        "doctor": ("doctor", "--json"),
    }
    for method in ("hqq", "gptqmodel"):
        (folder / method).with_suffix(".yaml").write_text(RTN.replace("rtn", method))
        asked[method] = (*build, folder / f"{method}.yaml", "--calibration", text)
    out: dict[str, Any] = {name: cli(*words) for name, words in asked.items()}
    try:
        answer(bundle, response_format={"type": "json_object"})
    except AssertionError as error:  # by `complete`, of a status
        out["schema"] = str(error)
    hide(SERVE)
    return out | {"serve": cli("serve", bundle)}


def main():
    """Fork for each name."""
    import torch  # noqa: F401  # which all children need

    where, *given = sys.argv[1:5]
    for name in sys.argv[5:]:
        folder = Path(where) / name
        folder.mkdir(parents=True)

        def work(name: str = name, folder: Path = folder):
            hide(ABSENT if name == "all" else [name])
            said = core(folder, *given)
            if name == "all":
                said |= {"refusals": refusals(folder, *given)}
            print(json.dumps(said), flush=True)

        assert os.waitpid(forked(work), 0)[1] == 0, name


if __name__ == "__main__":
    main()
