"""Make a Mixture-of-Experts of 0.7 B parameters that speaks English, and say what it is.

    python -m benchmarks.real --make
    python -m benchmarks.real
    python -m benchmarks.real --versions

SmolLM2-135M-Instruct's MLPs, each copied into eight experts of a Mixtral, two for each of prose, maths, code and chats
with calls of tools, trained a little on their own domain. It is an upcycled small model, not a released one, and its
base lies on a grid of 4 bits, so that a version of 4 bits may flatter itself: the second command, which measures it,
says how far the weights left that grid. Its routers begin as classifiers of the domain, so that nearly every token goes
to the two experts of its own: a flattering case for a policy. `--make` goes on where it was interrupted and ends in the
same bytes. The third builds it by two recipes and says what each version costs in divergence, perplexity and
answers. `--quick` runs all three on a small model of random weights.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.common import Target, arguments, finish
from moepack.pack.errors import InputError
from moepack.runtime.patches import quiet_libraries

from . import measure, upcycle, versions
from .make import MARK, make, tokens_of, written
from .source import SourceError, cache, dense, generated, source
from .texts import DOMAINS

WORKERS = 2  # branches trained at a time, 3 GB each beside 5 GB


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--make", action="store_true", help="train and save it; two cores take 20 minutes to an hour")
    parser.add_argument("--source", type=Path, help="the released GGUF file, where it cannot be fetched")
    parser.add_argument("--versions", action="store_true", help="build it by recipes, and evaluate their versions")
    args = parser.parse_args()
    if args.make and args.versions:
        parser.error("--make and --versions are two commands")
    if importlib.util.find_spec("gguf") is None:
        parser.error("the released file is read by gguf: pip install gguf")
    quiet_libraries()
    made = cache() / "model"
    try:
        if args.quick:
            _quick(args.json)
        elif args.make:
            _make(source(args.source), made, cache(), upcycle.Training())
        elif not (made / MARK).is_file():
            parser.error(f"{made} has no model made by this command: add --make")
        elif args.versions:
            _versions(made, args.json, count=6, each=30)
        else:
            _what_it_is(source(args.source), made, args.json, count=16)
    except (SourceError, InputError, OSError) as error:
        sys.exit(str(error))


def _quick(out: Path | None) -> None:
    """All three commands on a small generated model."""
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / "model"
        released = generated(Path(work) / "released")
        _make(released, made, Path(work), upcycle.Training(steps=2, length=128, rank=2))
        _what_it_is(released, made, out, count=2)
        _versions(made, out, count=2, each=2)


def _make(released: Path, made: Path, stages: Path, training: upcycle.Training) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a sum over several depends on how many there are
    make(released, made, stages, training, WORKERS)
    torch.set_num_threads(threads)


def _what_it_is(released: Path, made: Path, out: Path | None, count: int) -> None:
    model, tokenizer = dense(released)
    whole = {domain: upcycle.windows(tokens_of(tokenizer, domain, held=True), 512) for domain in DOMAINS}
    held = {domain: measure.spread(rows, count) for domain, rows in whole.items()}
    rows, targets, more = measure.measured(model, made, held, tokenizer.eos_token_id)
    more["made"] = json.loads((made / MARK).read_text())
    print(", ".join(f"{name}: {value:.3g}" for name, value in more["weights"].items()))
    finish("the upcycled model and its source", rows, targets, out, more)


def _versions(made: Path, out: Path | None, count: int, each: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    with tempfile.TemporaryDirectory() as work:
        calibration = [written(Path(work), tokenizer, domain, held=False) for domain in DOMAINS]
        data = [written(Path(work), tokenizer, domain, held=True) for domain in DOMAINS]
        rows = versions.compared(made, Path(work), tokenizer, calibration, data, count, each)
    shares = versions.at_equal_bits(rows, "uniform", "default")
    name = "of uniform's divergence at equal bits of experts"
    targets = [Target(f"default {version}: {name}", left, 0.75, "lower") for version, left in shares.items()]
    finish("versions of the upcycled model", rows, targets, out)


if __name__ == "__main__":
    main()
