"""Commands in forked children of a process that has imported everything: `python command_server.py`.

One JSON object a line comes in ("arguments" of moepack, or "code" of Python, and the files "stdout" and "stderr"), one
exit code a line goes out; a file "pid" beside them says who is at work. A child costs no imports, which take seven
seconds; what libraries read from the environment when they are imported is the server's. The picture of the same losses
is drawn once, by the first child that needs it: it takes longer than the rest of a push.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import datasets  # noqa: F401
import huggingface_hub.hf_api  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.colors
import matplotlib.figure  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import moepack.cli
import moepack.hub
import moepack.hub.upload
import moepack.pack.codec.exponent_fast
import moepack.pipeline.build
import moepack.pipeline.estimate
import moepack.reports.evaluate
import moepack.runtime.load
import moepack.runtime.plugin


def draw_once(folder: Path) -> None:
    """Have a push take the picture that one of the same manifest, tables and versions has drawn, from `folder`."""
    draw = moepack.hub.upload.plot

    def plot(path: str | Path, out: Path) -> None:
        files = [Path(path, name).read_bytes() for name in ("manifest.json", "calibration.safetensors")]
        drawn_of = repr((files, sorted(p.name for p in Path(path, "experts").iterdir())))
        picture = folder / (hashlib.sha256(drawn_of.encode()).hexdigest() + out.suffix)
        if not picture.exists():
            part = picture.with_name(f"part-{picture.name}")
            draw(path, part)
            part.replace(picture)  # whole or not there: a child may be killed
        out.write_bytes(picture.read_bytes())

    moepack.hub.upload.plot = plot


def child(task: dict[str, object]) -> None:
    """Run one task; never returns."""
    code = 1
    try:
        Path(str(task["stdout"])).with_name("pid").write_text(str(os.getpid()))
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            file = os.open(str(task[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        if "code" in task:
            exec(str(task["code"]), {"__name__": "__main__"})
        else:
            sys.argv = ["moepack", *task["arguments"]]  # type: ignore[misc]
            moepack.cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until the input ends."""
    pictures = tempfile.TemporaryDirectory()
    draw_once(Path(pictures.name))
    for line in sys.stdin:
        process = os.fork()
        if not process:
            child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
