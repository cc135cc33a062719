"""What the upcycled model is: its perplexity beside its source's, which experts serve which text, how far it moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.common import Row, Target
from moepack.reports.intervals import MeanInterval, clustered

from .texts import DOMAINS
from .upcycle import BRANCHES

_BLOCK = 32  # weights that share a scale in GGUF's Q4_1
_LEVELS = 15  # steps from the least to the largest weight of a block
COLUMNS = ("text", "tokens", "source", "upcycled", "upcycled, 95 %", "own experts %", "apart from other text %")


def measured(released: LlamaForCausalLM, made: Path, held: Mapping[str, Tensor]) -> tuple[list[Row], list[Target], Row]:
    """Rows by domain, what the model is held to, and facts about the weights.

    Args:
        released: the dense model.
        made: the directory of the upcycled one.
        held: of each domain, windows that training has not seen, int64 [windows, length].
    """
    mixture = cast(MixtralForCausalLM, AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval())
    traffic: dict[str, Tensor] = {}
    rows: list[Row] = []
    worst = 0.0
    for domain, ids in held.items():
        before = _perplexity(lambda x: released(input_ids=x).logits, ids)
        counts = torch.zeros(mixture.config.num_hidden_layers, len(BRANCHES))

        def count(x: Tensor, counts: Tensor = counts) -> Tensor:
            out = mixture(input_ids=x, output_router_logits=True)
            for layer, logits in enumerate(out.router_logits):
                chosen = logits.topk(mixture.config.num_experts_per_tok, -1).indices
                counts[layer] += chosen.flatten().bincount(minlength=len(BRANCHES))
            return cast(Tensor, out.logits)

        after = _perplexity(count, ids)
        traffic[domain] = counts / counts.sum(1, keepdim=True)
        own = [branch.expert for branch in BRANCHES if branch.domain == domain]
        rows.append(
            {
                "text": domain,
                "tokens": ids.shape[0] * (ids.shape[1] - 1),
                "source": before.mean,
                "upcycled": after.mean,
                "upcycled, 95 %": f"{after.low:.4g} to {after.high:.4g}",
                "own experts %": 100 * float(traffic[domain][:, own].sum(1).mean()),
            }
        )
        if domain == "prose":
            worst = after.mean / before.mean
    apart = []
    for row in rows:
        others = [_apart(traffic[str(row["text"])], traffic[domain]) for domain in DOMAINS if domain != row["text"]]
        row["apart from other text %"] = 100 * sum(others) / len(others)
        apart.append(row["apart from other text %"])
    targets = [
        Target("perplexity of held prose over the source's", worst, 1.1, "lower"),
        Target("least distance between texts' traffic, %", min(apart), 10.0, "higher"),
    ]
    return rows, targets, {"weights": _moved(released, mixture)}


def _perplexity(logits: Callable[[Tensor], Tensor], ids: Tensor) -> MeanInterval:
    """Perplexity of windows [windows, length], each scored from its second token on, with an interval over windows."""
    sums = []
    with torch.no_grad():
        for window in ids:
            scores = logits(window[None])[0, :-1].log_softmax(-1)
            sums.append(-float(scores.gather(1, window[1:, None]).sum()))
    return clustered(sums, [ids.shape[1] - 1] * len(sums)).exp()


def _apart(one: Tensor, other: Tensor) -> float:
    """The share of a layer's choices that would have to change to turn one text's traffic into another's, layers' mean.

    Total variation of two tables [layers, experts] of shares.
    """
    return float((one - other).abs().sum(1).mean() / 2)


@torch.no_grad()
def _moved(released: LlamaForCausalLM, mixture: MixtralForCausalLM) -> Row:
    """How far experts are from the released MLP, in steps of its grid of 4 bits and relative to its size."""
    steps, sizes, parts = 0.0, 0.0, 0
    for layer, base in zip(mixture.model.layers, released.model.layers, strict=True):
        experts = cast(MixtralSparseMoeBlock, layer.mlp).experts
        gate_up = torch.cat([base.mlp.gate_proj.weight, base.mlp.up_proj.weight])
        for old, new in ((gate_up, experts.gate_up_proj), (base.mlp.down_proj.weight, experts.down_proj)):
            blocks = old.reshape(len(old), -1, _BLOCK)
            step = (blocks.amax(-1) - blocks.amin(-1)).clamp_min(1e-12) / _LEVELS
            for expert in new:
                change = (expert - old).reshape(blocks.shape)
                steps += float((change / step[..., None]).square().mean())
                sizes += float(change.square().sum() / old.square().sum())
                parts += 1
    return {"grid steps moved, rms": (steps / parts) ** 0.5, "relative change, rms": (sizes / parts) ** 0.5}
