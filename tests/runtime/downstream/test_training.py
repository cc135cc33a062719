"""What is trained beside a bundle (docs/in-other-programs.md, "Training beside it"): losses are the plain model's."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState
from support import HOT, ids
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

NEAR = 2e-3  # of losses: experts' weights are the same, their sums may be in another order


@pytest.fixture(autouse=True)
def alone():
    """PEFT imports gptqmodel where that is installed, which sets variables, and accelerate keeps what it was told."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)


def lora(model, **options):
    """With adapters on attention, the same ones every time."""
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, config(**options))


def config(**options):
    from peft import LoraConfig

    chosen = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian", **options}
    return LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **chosen)


def train(model, steps):
    """Losses of so many steps on two batches in turn."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(steps):
        batch = ids(24, step % 2)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def near(ours, theirs):
    return len(ours) == len(theirs) and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < NEAR


@pytest.fixture
def checkpoint(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).requires_grad_(False)


@pytest.mark.row("PEFT: LoRA on attention, 40 steps", needs=["peft"])
def test_lora(row, another, checkpoint):
    ours, theirs = (train(lora(model), 40) for model in (another(dtype=torch.float32), checkpoint))
    assert theirs[-2] < theirs[0] - 0.5, "it learns"
    assert near(ours, theirs)
    row.refuses(train, lora(another(**HOT)), 1)


@pytest.mark.row("PEFT: adapters saved, loaded, merged; `add_adapter`", needs=["peft"])
def test_adapters(row, another, demo_model, tmp_path, same):
    """An adapter in the model's own precision, which is how `load_adapter` loads one, or in PEFT's float32.

    What changes weights or the order of sums is compared in float32. In BF16 a merged weight is rounded to 2^-9 of it,
    and a router may then choose another expert: no bound on logits follows from that.
    """
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.import_utils import is_peft_greater_or_equal

    made = lora(another())
    train(made, 2)
    made.save_pretrained(tmp_path / "adapter")
    path, some = str(tmp_path / "adapter"), ids(8, seed=2)
    plain = AutoModelForCausalLM.from_pretrained(demo_model)
    plain_merged = PeftModel.from_pretrained(plain, path).merge_and_unload().state_dict()
    plain = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        want = made(input_ids=some).logits
        plain.load_adapter(path)
        exact = plain(some).logits

        def close(logits):  # sums of up to 128 products in another order, through 4 layers
            return bool((logits - exact).abs().max() < 2.0**-14 * exact.abs().max())

        for options in ({}, HOT):
            model = another(**options)
            assert same(model)
            loaded = PeftModel.from_pretrained(model, path)
            assert torch.equal(loaded(input_ids=some).logits, want)
            with loaded.disable_adapter():
                assert not torch.equal(loaded(input_ids=some).logits, want)
            merged = loaded.merge_and_unload()
            weights = {n: t for n, t in merged.state_dict().items() if n.endswith(("q_proj.weight", "v_proj.weight"))}
            assert weights and all(torch.equal(t, plain_merged[n]) for n, t in weights.items())
            model = another(**options, dtype=torch.float32)
            assert close(PeftModel.from_pretrained(model, path).merge_and_unload()(some).logits)
            model = another(**options, dtype=torch.float32)
            model.load_adapter(path)
            assert close(model(some).logits)
        by_path = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(by_path(input_ids=some).logits, want)
    model = another()
    if not is_peft_greater_or_equal(MIN_PEFT_VERSION):  # transformers 5.24 came before PEFT 0.22
        with pytest.raises(ValueError, match="version of PEFT"):
            model.add_adapter(config())
        return
    model.add_adapter(config())
    assert train(model, 3)[-1] < 20
    model.save_pretrained(tmp_path / "added")
    assert {p.name for p in (tmp_path / "added").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    assert not (tmp_path / "added" / "model.safetensors").exists()


@pytest.mark.row("PEFT: LoRA on the experts' weights", needs=["peft"])
def test_lora_on_experts(row, another):
    from peft import LoraConfig, get_peft_model

    for options in ({}, HOT):
        experts = LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])
        row.refuses(get_peft_model, another(**options), experts)


def arguments(at, **options):
    fixed = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(at), **fixed, **quiet, **options)


ROWS = [{"input_ids": ids(24, s % 2)[0], "labels": ids(24, s % 2)[0]} for s in range(8)]


@pytest.mark.row("`Trainer` with an adapter: train, resume, evaluate, predict, save", needs=["peft"])
def test_trainer(row, another, checkpoint, tmp_path):
    told = []
    for name, model in (("ours", another(dtype=torch.float32)), ("theirs", checkpoint)):
        asked = arguments(tmp_path / name, save_steps=2)
        trainer = Trainer(lora(model), asked, train_dataset=ROWS, eval_dataset=ROWS)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        resumed = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        scores = [trainer.evaluate()["eval_loss"], trainer.predict(ROWS).metrics["test_loss"]]
        told.append([*losses, *resumed, *scores])
        saved = {p.name for p in (tmp_path / name / "checkpoint-4").iterdir()}
        assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    assert near(*told) and told[0][3] < told[0][0]
    hot = Trainer(lora(another(**HOT)), arguments(tmp_path / "hot"), train_dataset=ROWS, eval_dataset=ROWS)
    assert abs(hot.evaluate()["eval_loss"] - told[0][0]) < 0.5, "that of the first step, in BF16"
    row.refuses(hot.train)


@pytest.mark.row("`Trainer` of the model itself")
def test_trainer_alone(row, another, tmp_path):
    for options in ({}, HOT):
        model = another(**options)
        row.refuses(lambda model=model: Trainer(model, arguments(tmp_path), train_dataset=ROWS).train())


@pytest.mark.row("gradient checkpointing")
def test_checkpointing(row, another, checkpoint):
    grads = []
    for model in (another(dtype=torch.float32), checkpoint):
        model.gradient_checkpointing_enable()
        model.train()
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        model(ids(16), labels=ids(16)).loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
    hot = another(**HOT)
    hot.gradient_checkpointing_enable()
    hot.enable_input_require_grads()
    row.refuses(lambda: hot.train()(ids(16)))


@pytest.mark.row("accelerate: `prepare`, `unwrap_model`, `dispatch_model`, `cpu_offload`")
def test_accelerate(row, another, same):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    for options in ({}, HOT):
        model = another(**options)
        prepared = accelerator.prepare(model)
        assert same(prepared) and accelerator.unwrap_model(prepared) is model
        assert same(accelerate.dispatch_model(another(**options), {"": "cpu"}))
        assert same(accelerate.cpu_offload(another(**options), execution_device=torch.device("cpu")))
    accelerator.free_memory()
