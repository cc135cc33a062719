"""What the upcycled model is: its perplexity beside its source's, which experts serve which text, how far it moved."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.common import Row, Target
from moepack.reports.intervals import clustered

from .texts import DOMAINS
from .upcycle import BRANCHES, TWINS

_BLOCK = 32  # weights that share a scale in GGUF's Q4_1
_LEVELS = 15  # steps from the least to the largest weight of a block


def measured(
    released: LlamaForCausalLM, made: Path, held: Mapping[str, Tensor], ends: int
) -> tuple[list[Row], list[Target], Row]:
    """Rows by domain, what the model is held to, and facts about the weights.

    A row's "own experts" is the share of choices that fell on the experts trained on such text, "twins" the share of
    tokens that chose both of one domain, and "apart" the share of choices that other text makes otherwise, on average.

    Args:
        released: the dense model.
        made: the directory of the upcycled one.
        held: of each domain, windows that training has not seen, int64 [windows, length].
        ends: the token between documents. It and the token after it are not scored: the source has never seen them so.
    """
    mixture = cast(MixtralForCausalLM, AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval())
    traffic: dict[str, Tensor] = {}
    rows: list[Row] = []
    for domain, ids in held.items():
        before, scored = _losses(lambda x: released(input_ids=x).logits, ids, ends)
        counts = torch.zeros(mixture.config.num_hidden_layers, len(BRANCHES))
        twins: list[Tensor] = []

        def count(x: Tensor, counts: Tensor = counts, twins: list[Tensor] = twins) -> Tensor:
            out = mixture(input_ids=x, output_router_logits=True)
            for layer, logits in enumerate(out.router_logits):
                chosen = logits.topk(mixture.config.num_experts_per_tok, -1).indices
                counts[layer] += chosen.flatten().bincount(minlength=len(BRANCHES))
                domains = chosen // TWINS
                twins.append((domains == domains[:, :1]).all(-1).float().mean())
            return cast(Tensor, out.logits)

        after, _ = _losses(count, ids, ends)
        traffic[domain] = counts / counts.sum(1, keepdim=True)
        own = [branch.expert for branch in BRANCHES if branch.domain == domain]
        change = clustered([new - old for new, old in zip(after, before, strict=True)], scored).exp()
        rows.append(
            {
                "text": domain,
                "tokens": sum(scored),
                "source": clustered(before, scored).exp().mean,
                "upcycled": clustered(after, scored).exp().mean,
                "upcycled / source": change.mean,
                "95 %": f"{change.low:.3f} to {change.high:.3f}",
                "own experts %": 100 * float(traffic[domain][:, own].sum(1).mean()),
                "twins %": 100 * float(torch.stack(twins).mean()),
            }
        )
    for row in rows:
        others = [_apart(traffic[str(row["text"])], traffic[domain]) for domain in DOMAINS if domain != row["text"]]
        row["apart %"] = 100 * sum(others) / len(others)
    prose = rows[DOMAINS.index("prose")]
    targets = [Target("perplexity of held prose over the source's", prose["upcycled / source"], 1.1, "lower")]
    return rows, targets, {"weights": _moved(released, mixture)}


def spread(rows: Tensor, count: int) -> Tensor:
    """`count` of the windows [windows, length], evenly over all of them, or all where there are fewer."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).long()]


def _losses(logits: Callable[[Tensor], Tensor], ids: Tensor, ends: int) -> tuple[list[float], list[int]]:
    """Of windows [windows, length]: the summed loss of each in nats, and how many of its tokens were scored."""
    sums, counts = [], []
    with torch.no_grad():
        for window in ids:
            found = logits(window[None])[0, :-1].log_softmax(-1).gather(1, window[1:, None])[:, 0]
            text = (window[1:] != ends) & (window[:-1] != ends)
            sums.append(-float(found[text].sum()))
            counts.append(int(text.sum()))
    return sums, counts


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
