"""One launch of routing against plain torch and against the sort, the counts and the blocks of many tokens."""

import pytest
import torch
import torch_products

from moepack.runtime.kernels.forms import Routing
from moepack.runtime.kernels.routing_triton import Tally, reference, route
from moepack.runtime.policies.reducers import GATES, RouterOutput
from moepack.runtime.step.counters import Counters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device
# A gate is made of an exponential that may be one unit in the last place off, and of sums in another order. Triton's
# interpreter cuts numbers to BF16 where a GPU rounds them.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
FORMS = {  # each form that families use, with a number of experts: powers of two and others
    "olmoe": (64, Routing(8)),
    "qwen3": (128, Routing(8, normed=True)),
    "mixtral": (8, Routing(2, normed=True)),
    "gpt-oss": (32, Routing(4, "top")),
    "granite": (72, Routing(10, "top")),
    "minimax": (60, Routing(4, "sigmoid", True, biased=True)),
    "deepseek-v3": (256, Routing(8, "sigmoid", True, 2.5, True, 8, 4, "two")),
    "deepseek-v2": (160, Routing(6, scale=16.0, groups=8, kept=3)),
    "one expert": (1, Routing(1)),
    "the most": (512, Routing(16, normed=True)),
    "kept too few": (12, Routing(5, "sigmoid", True, 1.0, True, 4, 1, "two")),
}
CASES = [*((name, torch.float32) for name in FORMS), ("qwen3", torch.bfloat16), ("deepseek-v3", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_every_form(name, dtype):
    """Experts bit for bit, in order, of logits many of which are equal; then counts, gate sums and blocks.

    One token takes one launch; the experts of 16 are chosen by a launch of their own.
    """
    experts, form = FORMS[name]
    table = torch.ones(experts, dtype=torch.int64, device=DEVICE)
    for tokens, of_gates in ((1, dtype), (16, dtype), (2, torch.float32)):
        generator = torch.Generator().manual_seed(experts + tokens)
        bias = torch.randn(experts, generator=generator) * 0.1 if form.biased else None
        logits = (torch.randn(tokens, experts, generator=generator) * 2).bfloat16().to(dtype)
        mask = torch.arange(tokens) % 3 != 1
        counts = torch.full((experts + 1,), 5, dtype=torch.int64, device=DEVICE)
        sums = torch.ones(experts + 1, dtype=torch.float64, device=DEVICE)
        there = None if bias is None else bias.to(DEVICE)
        tally = Tally(counts, sums, mask.long().to(DEVICE))
        made = route(form, table, 16, logits.to(DEVICE), there, tally=tally, dtype=of_gates)
        index, gates = reference(form, logits, bias)
        assert torch.equal(made.index.cpu(), index), tokens
        assert made.gates.dtype == of_gates
        torch.testing.assert_close(made.gates.cpu().float(), gates, rtol=TOLERANCE[of_gates], atol=1e-30)
        known = Counters([experts], (GATES,), torch.device("cpu"))
        known.mask = mask.long()
        known.add(0, RouterOutput(index, made.gates.cpu()))
        assert torch.equal(counts.cpu() - 5, known.counts[0])
        torch.testing.assert_close(sums.cpu() - 1, known.sums[GATES][0], rtol=1e-14, atol=1e-14)
        check_blocks(made, index.reshape(-1), torch.ones(index.numel(), dtype=torch.bool))


def check_blocks(made, index, live, width=16):
    """Each slot that is live is in one block of its expert, and no block has more than `width`."""
    geometry, seen = made.geometry, []
    for expert, first, count in zip(
        *(t.tolist() for t in (geometry.expert, geometry.first, geometry.count)), strict=True
    ):
        slots = geometry.order[first : first + count].tolist()
        assert count <= width and all(index[s] == expert for s in slots)
        seen += slots
    assert sorted(seen) == live.nonzero().flatten().tolist()
    assert torch.equal(made.live.cpu().bool(), live)


def test_the_families_routers_are_forms():
    """The reference is what transformers' routers compute."""
    from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    grouped = {"n_group": 4, "topk_group": 2, "n_routed_experts": 24, "num_experts_per_tok": 6, "hidden_size": 32}
    grouped |= {"routed_scaling_factor": 2.5}
    plain = {"num_experts_per_tok": 4, "hidden_size": 32}
    v2 = DeepseekV2Config(**grouped, topk_method="group_limited_greedy")
    cases = [
        (Qwen3MoeTopKRouter(Qwen3MoeConfig(**plain, num_experts=24, norm_topk_prob=True)), Routing(4, normed=True)),
        (Qwen3MoeTopKRouter(Qwen3MoeConfig(**plain, num_experts=24, norm_topk_prob=False)), Routing(4)),
        (GptOssTopKRouter(GptOssConfig(**plain, num_local_experts=24)), Routing(4, "top")),
        (DeepseekV3TopkRouter(DeepseekV3Config(**grouped)), Routing(6, "sigmoid", True, 2.5, True, 4, 2, "two")),
        (DeepseekV2TopkRouter(v2), Routing(6, scale=2.5, groups=4, kept=2)),
    ]
    for router, form in cases:
        torch.manual_seed(0)
        bias = getattr(router, "e_score_correction_bias", None)
        for tensor in (router.weight, *([] if bias is None else [bias])):
            tensor.data.normal_(0, 0.3)
        with torch.no_grad():
            logits, gates, index = router(torch.randn(64, 32))
            got, weights = reference(form, logits, bias)
        order = index.argsort(-1)  # some routers do not sort their choice
        assert torch.equal(index.gather(1, order), got.sort(-1)[0])
        torch.testing.assert_close(gates.gather(1, order), weights.gather(1, got.argsort(-1)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("width", [8, 16])
def test_what_families_chose_themselves(width, monkeypatch):
    """Sentinels, padding, absent experts, one that a token chose often: each slot once, in blocks that it fits.

    Then by the stand-in of torch_products.py, with which tests of what is around run.
    """
    table = torch.tensor([64, 64, 0, 64, 64, 64], device=DEVICE)
    index = torch.randint(-1, 7, (16, 3), generator=torch.Generator().manual_seed(0))
    index[:, 1:] = 4  # 32 slots, more than a block has
    gates, mask = torch.rand(16, 3), torch.arange(16) % 3 > 0
    flat = index.reshape(-1).clamp(min=0)
    want = torch.zeros(7, dtype=torch.float64).index_add_(0, flat, (gates.double() * mask[:, None]).reshape(-1))
    for _ in ("interpreted", "by torch"):
        tally = Tally(
            *(torch.zeros(7, dtype=t, device=DEVICE) for t in (torch.int64, torch.float64)), mask.long().to(DEVICE)
        )
        made = route(Routing(3), table, width, given=(index.to(DEVICE), gates.to(DEVICE)), tally=tally)
        check_blocks(made, flat, (flat != 6) & (flat != 2), width)
        text = torch.bincount(flat[mask.repeat_interleave(3)], minlength=7)
        assert tally.counts.tolist()[:6] == text.tolist()[:6], "absent experts are traffic"
        torch.testing.assert_close(tally.sums.cpu()[:6], want[:6], rtol=1e-14, atol=0)
        torch_products.install(monkeypatch)


def test_numbers_that_are_none_choose_experts_that_there_are():
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3], logits[2, 7] = -0.0, 0.0
    made = route(Routing(4, "top"), torch.ones(12, dtype=torch.int64, device=DEVICE), 16, logits.to(DEVICE))
    assert made.index[0, 0] == 5 and made.index[1].tolist() == [0, 1, 2, 3]
    assert all(len(set(row)) == 4 and max(row) < 12 for row in made.index.tolist())


@pytest.mark.parametrize("tokens", [0, 17])
def test_other_shapes_are_refused(tokens):
    table = torch.ones(8, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="routing of"):
        route(Routing(2), table, 16, torch.zeros(tokens, 8, device=DEVICE))
    with pytest.raises(ValueError, match="routing of"):
        route(Routing(2, biased=True), table, 16, torch.zeros(2, 8, device=DEVICE))
