"""Linear attention between a layer's projections: one kernel call beside transformers' own code, in one run.

    python -m benchmarks.kernels.linear [--tokens N ...]

Layers of Qwen3-Next's and Nemotron-3-Nano's true shape on one thread, whose projections return the same numbers at
once, so that only what lies between them is measured. Passes walk through the states of 24 layers, more than caches
hold. The floor is the time in which torch adds to a tensor of a state's size in place, which reads and writes its
bytes. Lower quartiles of processor time; both sides take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Row, Target, arguments, finish, lower_quartile

LAYERS = 24
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "nemotron_h": {
        "hidden_size": 2688,
        "layers_block_type": ["linear_attention", "moe"],
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "mamba_n_groups": 8,
    },
}
OVER = 1.5  # the most time of a token, as a multiple of the floor's


class Given(nn.Module):
    """In place of a projection: returns what it was given."""

    def __init__(self, cols: int) -> None:
        super().__init__()
        self.cols = cols
        self.made: dict[torch.Size, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the same random numbers, bfloat16 [batch, tokens, cols], for any input of so many tokens."""
        size = x.shape[:2]
        if size not in self.made:
            self.made[size] = torch.randn(*size, self.cols).bfloat16()
        return self.made[size]


def layer(family: str) -> tuple[Any, Any]:
    """One layer with random weights, and its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=64, **SHAPES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made: Any = next(module for module in model.modules() if hasattr(module, "conv1d"))
    for name, module in made.named_children():
        if isinstance(module, nn.Linear):
            setattr(made, name, Given(module.out_features))
    made = made.to_empty(device="cpu").bfloat16().requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(0, 0.5)
    return made, config


def timed(run: Callable[[Any], object], caches: list[Any]) -> float:
    """Processor seconds of one pass, the mean over the caches."""
    began = time.process_time()
    for cache in caches:
        run(cache)
    return (time.process_time() - began) / len(caches)


def measure(family: str, tokens: int, turns: int) -> Row:
    """Time passes of so many tokens by the module's own code, and by the kernel."""
    from transformers import DynamicCache

    from moepack.runtime.dense.linear_attention import serve_linear_attention

    module, config = layer(family)
    plain = type(module).forward
    holder = nn.Module()
    holder.layer, holder.config = module, config
    if not serve_linear_attention(holder):
        raise SystemExit("the kernel's results differ from the model's own code: see the log")
    served = type(module).forward
    x = torch.randn(1, tokens, config.hidden_size).bfloat16()
    caches: list[Any] = [DynamicCache(config=config) for _ in range(LAYERS if tokens < 64 else 2)]
    own: list[float] = []
    ours: list[float] = []
    with torch.no_grad():
        for cache in caches:
            plain(module, hidden_states=x, cache=cache)
        for _ in range(turns):
            own.append(timed(lambda cache: plain(module, hidden_states=x, cache=cache), caches))
            ours.append(timed(lambda cache: served(module, hidden_states=x, cache=cache), caches))
    states = [cache.layers[0].recurrent_states[0] for cache in caches]
    floor = [timed(lambda state: state.add_(1.0), states) for _ in range(turns)]
    us, wanted, least = (1e6 * lower_quartile(found) for found in (ours, own, floor))
    row: Row = {
        "layer": family,
        "tokens": tokens,
        "ours us": round(us),
        "transformers us": round(wanted),
        "speed-up": round(wanted / us, 2),
    }
    return row | ({"state us": round(least), "over floor": round(us / least, 2)} if tokens == 1 else {})


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 512])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(family, tokens, 2 if args.quick else 7) for family in SHAPES for tokens in args.tokens]
    targets = [
        Target(f"a token over its state's bytes, {row['layer']}", row["over floor"], OVER, "lower")
        for row in rows
        if "over floor" in row
    ]
    columns = ["layer", "tokens", "ours us", "transformers us", "speed-up", "state us", "over floor"]
    finish("linear attention between projections, one thread", columns, rows, targets, args.json)


if __name__ == "__main__":
    main()
