"""A checkpoint as a GGUF file in BF16, by llama.cpp's own converter, without a vocabulary.

    python -m benchmarks.contexts.convert SOURCE CHECKPOINT OUT

SOURCE is llama.cpp's source, which llama-cpp-python's archive holds. Runs in moepack's environment, which has torch.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, checkpoint: Path, out: Path) -> None:
    """Write the file. Raises what the converter raises for a model that it does not know."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    theirs: Any = importlib.import_module("conversion")
    gguf: Any = importlib.import_module("gguf")
    facts = theirs.ModelBase.load_hparams(checkpoint, False)
    kind = theirs.get_model_class(theirs.get_model_architecture(facts, theirs.ModelType.TEXT))

    def no_vocabulary(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("none")
        model.gguf_writer.add_vocab_size(facts["vocab_size"])

    kind.set_vocab = no_vocabulary
    kind.no_mtp = True
    kind(checkpoint, gguf.LlamaFileType.MOSTLY_BF16, out).write()


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
