"""Each MLP copied into experts, the experts trained apart as branches of a domain, then the routers trained over them.

After "Branch-Train-MiX" (Sukhbaatar et al., 2024) and "Sparse Upcycling" (Komatsuzaki et al., ICLR 2023). A branch is a
low-rank change of every MLP of the dense model (LoRA, Hu et al., ICLR 2022), trained on one domain; the rest of the
model stays as it was released. Two branches a domain, each on its half of the text, make eight experts a layer.

On machines with one instruction set and one release of torch everything is a function of the texts and the seed: each
stage runs on one thread, begins with its own seed and ends in a file, so that an interrupted run goes on with the
stages that are left and ends in the same bytes.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func

from .texts import DOMAINS

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TOP_K = 2
TWINS = 2  # branches of a domain
_RIDGE = 1e-2  # of the mean square of a router's inputs
_DECISIVE = 3.0  # root mean square of the first router's logits: the likelier experts get most of a token
_KEPT = (  # settings of the dense model
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_SHOWN = 4  # windows of each domain from which the first routers are fitted
_BALANCE = 0.01  # weight of the loss that keeps all experts in use, in Switch Transformers' form


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long and how fast: the numbers on which the trained bytes depend."""

    steps: int = 20  # of each branch, and of the routers
    batch: int = 1  # windows a step
    length: int = 512  # tokens of a window
    rank: int = 16
    rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Branch:
    """One expert of every layer: a domain and which of its halves."""

    domain: str
    half: int

    @property
    def expert(self) -> int:
        """Its index in every layer."""
        return DOMAINS.index(self.domain) * TWINS + self.half


BRANCHES = tuple(Branch(domain, half) for domain in DOMAINS for half in range(TWINS))


class LowRank(nn.Module):
    """A frozen linear layer and a change of low rank: y = W x + 2 B (A x)."""

    SCALE = 2.0

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return cast(Tensor, self.linear(x)) + self.SCALE * ((x @ self.a.T) @ self.b.T)


def windows(ids: Sequence[int], length: int) -> Tensor:
    """The tokens of a text cut into windows: int64 [windows, length]. What is left over at the end is not used."""
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)


def experts_of(model: LlamaForCausalLM) -> MixtralForCausalLM:
    """The model with every MLP copied into eight experts and routers of zeros; float32.

    Two equal experts with weights of one half each add up to the MLP exactly, so that the logits have the same bits.
    """
    old = model.config
    config = MixtralConfig(
        **{name: getattr(old, name) for name in _KEPT},
        sliding_window=None,
        num_local_experts=len(BRANCHES),
        num_experts_per_tok=TOP_K,
    )
    with torch.device("meta"):
        mixture = MixtralForCausalLM._from_config(config, experts_implementation="eager")
    mixture = mixture.to_empty(device="cpu")
    mixture.model.rotary_emb = type(mixture.model.rotary_emb)(config)
    mixture.model.embed_tokens = model.model.embed_tokens
    mixture.lm_head = model.lm_head
    mixture.model.norm = model.model.norm
    for layer, released in zip(mixture.model.layers, model.model.layers, strict=True):
        block = cast(MixtralSparseMoeBlock, layer.mlp)
        gate_up = torch.cat([released.mlp.gate_proj.weight, released.mlp.up_proj.weight])
        block.gate.weight = nn.Parameter(torch.zeros(len(BRANCHES), config.hidden_size))
        block.experts.gate_up_proj = nn.Parameter(gate_up.detach().repeat(len(BRANCHES), 1, 1))
        block.experts.down_proj = nn.Parameter(released.mlp.down_proj.weight.detach().repeat(len(BRANCHES), 1, 1))
        layer.self_attn.load_state_dict(released.self_attn.state_dict())
        layer.input_layernorm.load_state_dict(released.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(released.post_attention_layernorm.state_dict())
    mixture.eval().requires_grad_(False)
    return cast(MixtralForCausalLM, mixture)


def train_branch(model: LlamaForCausalLM, branch: Branch, data: Tensor, training: Training, path: Path) -> None:
    """Train a branch on its half of a domain's windows [windows, length], and write its factors in BF16 to `path`."""
    torch.manual_seed(training.seed * 1000 + branch.expert)
    model.requires_grad_(False)
    own = data[branch.half :: TWINS]
    changed: dict[str, LowRank] = {}
    for index, layer in enumerate(model.model.layers):
        for name in PROJECTIONS:
            change = LowRank(getattr(layer.mlp, name), training.rank)
            setattr(layer.mlp, name, change)
            changed[f"{index}.{name}"] = change
    try:
        parameters = [p for change in changed.values() for p in (change.a, change.b)]

        def loss(ids: Tensor) -> Tensor:
            return cast(Tensor, model(input_ids=ids, labels=ids, use_cache=False).loss)

        _descend(f"{branch.domain} {branch.half}", parameters, loss, own, training)
        factors = {
            f"{name}.{part}": getattr(change, part).detach().to(torch.bfloat16)
            for name, change in changed.items()
            for part in ("a", "b")
        }
    finally:
        for layer in model.model.layers:
            for name in PROJECTIONS:
                setattr(layer.mlp, name, getattr(layer.mlp, name).linear)
    _write(factors, path)


def add_branch(mixture: MixtralForCausalLM, branch: Branch, path: Path) -> None:
    """Add a branch's changes to its expert of every layer."""
    factors = load_file(path)
    inner = mixture.config.intermediate_size
    for index, layer in enumerate(mixture.model.layers):
        experts = cast(MixtralSparseMoeBlock, layer.mlp).experts
        gate_up = experts.gate_up_proj[branch.expert]
        parts = {
            "gate_proj": gate_up[:inner],
            "up_proj": gate_up[inner:],
            "down_proj": experts.down_proj[branch.expert],
        }
        for name, weight in parts.items():
            a = factors[f"{index}.{name}.a"].float()
            b = factors[f"{index}.{name}.b"].float()
            weight += LowRank.SCALE * (b @ a)


def train_routers(mixture: MixtralForCausalLM, data: dict[str, Tensor], training: Training, path: Path) -> None:
    """Fit each router to tell the domains apart, then train all of them on the mixed text; write them to `path`.

    Args:
        mixture: with all branches added.
        data: of each domain, the windows [windows, length].
        training: steps and rates; the rate is that of the branches.
        path: receives a tensor [experts, hidden] a layer, float32.
    """
    torch.manual_seed(training.seed * 1000 + len(BRANCHES))
    gates = [cast(MixtralSparseMoeBlock, layer.mlp).gate for layer in mixture.model.layers]
    shown = {domain: rows[:_SHOWN] for domain, rows in data.items()}
    for gate, weight in zip(gates, _separating(mixture, shown), strict=True):
        gate.weight.copy_(weight)
    mixed = torch.cat(list(data.values()))
    parameters = [gate.weight for gate in gates]
    for parameter in parameters:
        parameter.requires_grad_(True)

    def loss(ids: Tensor) -> Tensor:
        out = mixture(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        balance = load_balancing_loss_func(out.router_logits, len(BRANCHES), TOP_K)
        own = out.loss - mixture.router_aux_loss_coef * out.aux_loss
        return cast(Tensor, own + _BALANCE * balance)

    _descend("routers", parameters, loss, mixed, training)
    _write({str(i): gate.weight.detach() for i, gate in enumerate(gates)}, path)


def set_routers(mixture: MixtralForCausalLM, path: Path) -> None:
    """Put trained routers into the model."""
    weights = load_file(path)
    for index, layer in enumerate(mixture.model.layers):
        cast(MixtralSparseMoeBlock, layer.mlp).gate.weight = nn.Parameter(weights[str(index)], requires_grad=False)


def _separating(mixture: MixtralForCausalLM, shown: dict[str, Tensor]) -> list[Tensor]:
    """First routers: by ridge regression from a router's inputs to the domain of their text. [experts, hidden] a layer.

    Twins differ by noise of a tenth, or none of the two would ever be chosen without the other.
    """
    inputs: list[list[Tensor]] = [[] for _ in mixture.model.layers]
    domains: list[Tensor] = []
    hooks = []
    for index, layer in enumerate(mixture.model.layers):

        def keep(_: nn.Module, given: tuple[Tensor, ...], index: int = index) -> None:
            inputs[index].append(given[0].reshape(-1, given[0].shape[-1]))

        hooks.append(layer.mlp.register_forward_pre_hook(keep))
    with torch.no_grad():
        for domain, rows in shown.items():
            mixture.model(input_ids=rows, use_cache=False)
            domains.append(torch.full((rows.numel(),), DOMAINS.index(domain)))
    for hook in hooks:
        hook.remove()
    wanted = nn.functional.one_hot(torch.cat(domains), len(DOMAINS)).float()
    wanted -= wanted.mean(0)
    weights = []
    for parts in inputs:
        x = torch.cat(parts)
        square = x.T @ x
        ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square))
        fitted = torch.linalg.solve(square + ridge, x.T @ wanted).T
        fitted *= _DECISIVE / (x @ fitted.T).square().mean().sqrt()
        twins = fitted.repeat_interleave(TWINS, 0)
        weights.append(twins + 0.1 * twins.square().mean().sqrt() * torch.randn_like(twins))
    return weights


def _descend(
    title: str,
    parameters: Sequence[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    data: Tensor,
    training: Training,
) -> None:
    """AdamW over shuffled windows, the rate rising over four steps and falling by a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=training.rate, betas=(0.9, 0.99), weight_decay=0.0)
    order = torch.cat([torch.randperm(len(data)) for _ in range(1 + training.steps * training.batch // len(data))])
    began = time.monotonic()
    for step in range(training.steps):
        rising = min(1.0, (step + 1) / 4)
        falling = 0.5 * (1 + math.cos(math.pi * step / training.steps))
        for group in optimizer.param_groups:
            group["lr"] = training.rate * rising * falling
        value = loss(data[order[step * training.batch :][: training.batch]])
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        seconds = time.monotonic() - began
        print(f"{title}: step {step + 1} of {training.steps}, loss {value.item():.3f}, {seconds:.0f} s", flush=True)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a whole file, or none."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.rename(path)


def whole(path: Path) -> bool:
    """Whether a stage has been written, and can be read."""
    if not path.exists():
        return False
    try:
        load_file(path)
    except SafetensorError:
        return False
    return True
