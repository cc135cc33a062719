"""Keep beside a bundle's released version what else its checkpoint's tensors need to be written again byte for byte.

`released.json` has the checkpoint's quantisation config and the names, dtypes and shapes of its tensors by file;
`released.safetensors` has the small tensors that belong to codes and scales and that serving does not read.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.writer import BundleWriter

from .artifacts import save

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = "released.json"
LEFTOVERS = "released.safetensors"


def keep_released(checkpoint: Path, writer: BundleWriter) -> None:
    """Add both files to a bundle that is being written."""
    from safetensors import safe_open

    from moepack.calibrate.checkpoint import open_checkpoint

    opened = open_checkpoint(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    files = {
        file: {name: [entry.dtype, list(entry.shape)] for name, entry in header.tensors.items()}
        for file, header in opened.headers.items()
    }
    # Models with a tower may have it in their `text_config`, where the bundle's config.json has it still: null here.
    document = {"quantization_config": config.get("quantization_config"), "files": files}
    writer.path(TENSORS).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    writer.add(TENSORS)
    left: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        read = {}
        for encoded in opened.encoded.values():
            for name in encoded.leftovers:
                file = opened.file_of[name]
                if file not in read:
                    read[file] = stack.enter_context(safe_open(opened.path / file, framework="pt"))
                left[name] = read[file].get_tensor(name)
        if left:
            save(writer.path(LEFTOVERS), left)
            writer.add(LEFTOVERS)
