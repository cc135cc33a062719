"""One launch of routing against plain torch and against the sort, the counts and the blocks of many tokens."""

import pytest
import torch
import torch_products

from moepack.runtime.policies.reducers import GATES, RouterOutput
from moepack.runtime.step.counters import Counters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device
# A gate is made of an exponential that may be one unit in the last place off, and of sums in another order. Triton's
# interpreter cuts numbers to BF16 where a GPU rounds them.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}


def forms():
    """Each form that families use, with a number of experts: powers of two and others."""
    from moepack.runtime.kernels.routing_triton import Routing

    return {
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


def inputs(experts, tokens, biased, dtype):
    generator = torch.Generator().manual_seed(experts + tokens)
    bias = torch.randn(experts, generator=generator) * 0.1 if biased else None
    return (torch.randn(tokens, experts, generator=generator) * 2).to(dtype), bias


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", forms())
def test_every_form(name, dtype):
    """Experts bit for bit, in order, with BF16 logits among which many are equal; then counts, gate sums and blocks."""
    from moepack.runtime.kernels.routing_triton import Tally, reference, route

    experts, form = forms()[name]
    table = torch.ones(experts, dtype=torch.int64, device=DEVICE)
    for tokens in (1, 16):
        logits, bias = inputs(experts, tokens, form.biased, dtype)
        mask = torch.arange(tokens) % 3 != 1
        counts = torch.full((experts + 1,), 5, dtype=torch.int64, device=DEVICE)
        sums = torch.ones(experts + 1, dtype=torch.float64, device=DEVICE)
        there = None if bias is None else bias.to(DEVICE)
        made = route(
            form, table, 16, logits.to(DEVICE), there, tally=Tally(counts, sums, mask.long().to(DEVICE))
        )  # fmt: skip
        index, gates = reference(form, logits, bias)
        assert torch.equal(made.index.cpu(), index), tokens
        assert made.gates.dtype == dtype
        torch.testing.assert_close(made.gates.cpu().float(), gates, rtol=TOLERANCE[dtype], atol=1e-30)
        known = Counters([experts], (GATES,), torch.device("cpu"))
        known.mask = mask.long()
        known.add(0, RouterOutput(index, made.gates.cpu()))
        assert torch.equal(counts.cpu() - 5, known.counts[0])
        torch.testing.assert_close(sums.cpu() - 1, known.sums[GATES][0], rtol=1e-14, atol=1e-14)
        check_blocks(made, experts)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_many_tokens(name):
    from moepack.runtime.kernels.routing_triton import choose, reference

    experts, form = forms()[name]
    logits, bias = inputs(experts, 40, form.biased, torch.bfloat16)
    index, gates = choose(form, logits.to(DEVICE), None if bias is None else bias.to(DEVICE), torch.float32)
    want = reference(form, logits, bias)
    assert torch.equal(index.cpu(), want[0]) and gates.dtype == torch.float32
    torch.testing.assert_close(gates.cpu(), want[1], rtol=1e-6, atol=1e-30)


def check_blocks(made, absent_from):
    """Each slot of an expert that is there is in one block of that expert."""
    index, geometry, seen = made.index.reshape(-1).tolist(), made.geometry, []
    for expert, first, count in zip(
        *(t.tolist() for t in (geometry.expert, geometry.first, geometry.count)), strict=True
    ):
        slots = geometry.order[first : first + count].tolist()
        assert count <= 16 and all(index[s] == expert for s in slots)
        seen += slots
    live = [s for s, e in enumerate(index) if 0 <= e < absent_from]
    assert sorted(seen) == live and made.live.nonzero().flatten().tolist() == live


def test_the_families_routers_are_forms():
    """The reference is what transformers' routers compute."""
    from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    from moepack.runtime.kernels.routing_triton import Routing, reference

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


def test_what_families_chose_themselves():
    """Sentinels, absent experts, an expert that one token chose often: each slot once, in blocks that it fits."""
    from moepack.runtime.kernels.routing_triton import Routing, Tally, route

    table = torch.ones(6, dtype=torch.int64, device=DEVICE)
    table[2] = 0
    index = torch.randint(0, 7, (16, 3), generator=torch.Generator().manual_seed(0))
    index[:, 1:] = 4  # 32 slots, twice as many as a block has
    gates = torch.rand(16, 3)
    counts, sums = torch.zeros(7, dtype=torch.int64, device=DEVICE), torch.zeros(7, dtype=torch.float64, device=DEVICE)
    made = route(
        Routing(3), table, 16, given=(index.to(DEVICE), gates.to(DEVICE)), tally=Tally(counts, sums)
    )  # fmt: skip
    flat, seen = index.reshape(-1), []
    for e, first, count in zip(made.geometry.expert, made.geometry.first, made.geometry.count, strict=True):
        slots = made.geometry.order[first : first + count].tolist()
        assert count <= 16 and all(flat[s] == e for s in slots)
        seen += slots
    live = (flat != 6) & (flat != 2)
    assert sorted(seen) == live.nonzero().flatten().tolist() and torch.equal(made.live.cpu().bool(), live)
    assert counts.tolist()[:6] == torch.bincount(flat, minlength=7).tolist()[:6], "absent experts are traffic"
    want = torch.zeros(7, dtype=torch.float64).index_add_(0, flat, gates.double().reshape(-1))
    torch.testing.assert_close(sums.cpu()[:6], want[:6], rtol=1e-14, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are not interpreted")
@pytest.mark.parametrize("width", [8, 16])
def test_a_stand_in_makes_the_same_blocks(width, monkeypatch):
    """That of torch_products.py, for tests of what is around: the kernel's blocks and counters, with padding, too."""
    from moepack.runtime.kernels.routing_triton import Routing, Tally, route

    table = torch.tensor([64, 64, 0, 64, 64, 64])
    index = torch.randint(-1, 7, (16, 3), generator=torch.Generator().manual_seed(0))
    index[:, 1:] = 4  # 32 slots, more than a block has
    gates, mask = torch.rand(16, 3), (torch.arange(16) % 3 > 0).long()
    found = []
    for _ in ("interpreted", "by torch"):
        tally = Tally(torch.ones(7, dtype=torch.int64), torch.ones(7, dtype=torch.float64), mask)
        made = route(Routing(3), table, width, given=(index, gates), tally=tally)
        of = made.geometry
        placed = [of.order[a : a + n].tolist() for a, n in zip(of.first.tolist(), of.count.tolist(), strict=True)]
        assert sum(map(len, placed)) == made.live.sum()
        found.append([placed, of.expert.tolist(), made.live.tolist(), tally.counts.tolist(), tally.sums])
        torch_products.install(monkeypatch)
    assert found[0][:-1] == found[1][:-1]
    torch.testing.assert_close(found[0][-1], found[1][-1], rtol=1e-14, atol=0)


def test_numbers_that_are_none_choose_experts_that_there_are():
    from moepack.runtime.kernels.routing_triton import Routing, route

    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3], logits[2, 7] = -0.0, 0.0
    made = route(Routing(4, "top"), torch.ones(12, dtype=torch.int64, device=DEVICE), 16, logits.to(DEVICE))
    assert made.index[0, 0] == 5 and made.index[1].tolist() == [0, 1, 2, 3]
    assert all(len(set(row)) == 4 and max(row) < 12 for row in made.index.tolist())


@pytest.mark.parametrize("tokens", [0, 17])
def test_other_shapes_are_refused(tokens):
    from moepack.runtime.kernels.routing_triton import Routing, route

    table = torch.ones(8, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="routing of"):
        route(Routing(2), table, 16, torch.zeros(tokens, 8, device=DEVICE))
    with pytest.raises(ValueError, match="routing of"):
        route(Routing(2, biased=True), table, 16, torch.zeros(2, 8, device=DEVICE))
