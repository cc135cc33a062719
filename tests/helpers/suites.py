"""Which tests `make test` runs, and which only `make test-all` does.

`make test` has eight minutes on two cores. A test leaves it (pytest's marker `full`) if it costs processor seconds and
another test proves the same at less cost, or if what it proves changes rarely. Each entry says which. Of a test with a
parameter `level`, an instruction set, `make test` runs the best one that the processor has.
"""

from collections.abc import Sequence

import pytest

WITHOUT_FULL = "not full"  # pytest's -m in `make test`

# Names that files, or tests of a file, begin with: `make test-all` alone runs them. Beside each: why, and where
# `make test` or `.ci/run` proves what is needed at every commit.
FULL: dict[str, str] = {
    # Processes, packages and programs of others
    "moepack/engines/test_served.py::test_an_engine_of_other_parts": "processes; the other tests have stand-ins",
    "whole/test_lacking.py::test_without_linux": "calls of Linux are added rarely; test_without_any runs the commands",
    "docs/test_commands": "documents are typed; `make demo` runs the README's main job",
    "moepack/pipeline/test_ray": "a cluster is started; pipeline/test_executors runs the same tasks without one",
    "moepack/server/test_replicas": "Ray again; server/test_front and test_command run one replica",
    "moepack/test_packaging": "wheels are built and installed; test_imports holds what each folder may import",
    "moepack/reports/test_tasks": "lm-evaluation-harness; reports/test_evaluate scores the same model",
    "runtime/downstream/test_generating": "rows of docs/in-other-programs.md; test_object",
    "runtime/downstream/test_training": "rows of docs/in-other-programs.md; downstream/test_object",
    "runtime/downstream/test_object.py::test_compile": "torch.compile; runtime/test_compile",
    "runtime/test_compile.py::test_by_the_compiler_that_is_used": "compiles for seconds; the other cases trace",
    "moepack/export/test_gguf.py::test_k_quants": "processes of llama.cpp; test_when_llama_cpp_ends has a stand-in",
    "moepack/export/test_gptq.py::test_gptqmodel_reads_our_values": "importing gptqmodel: 40 s; test_values",
    "quantize/test_quantize.py::test_importing_gptqmodel_leaves_the_environment": "importing gptqmodel: 8 s",
    "runtime/kernels/test_sanitised": "the libraries are compiled again under sanitisers",
    "benchmarks/test_gpu.py::test_compiled_kernels_keep": "kernels are compiled for six architectures",
    "benchmarks/test_gpu.py::test_the_gpu_half": "interpreted kernels; kernels/test_affine_triton checks the numbers",
    # Processes of our own, killed or measured
    "runtime/test_process_limit.py::test_a_process_keeps_its_limit": "a process in a cage",
    "moepack/server/test_command.py::test_it_answers_soon": "a process; server/test_front",
    "runtime/test_load.py::test_without_moepack": "a process without moepack",
    "moepack/pipeline/test_add.py::test_killed_at_every_step": "kills; the other tests stop between steps",
    "moepack/pipeline/test_bound.py::test_processes_stay": "measures a process; the other tests",
    "runtime/planning/test_fixed.py::test_the_process_takes": "measures a process; the other tests",
    "runtime/test_load.py::test_a_process_that_does_not_close": "a process; residency/test_worker",
    "runtime/kernels/test_affine_native.py::test_without_the_extension": "a process; kernels/test_by_torch",
    "benchmarks/test_limited.py::test_a_refusal_is_a_row": "a process in a cage",
    "moepack/pipeline/test_executors.py::test_batches_made_at_once": "three builds, 23 s; executors change rarely",
    "moepack/test_hub.py::test_a_released_checkpoint": "a build from a Hub; whole/test_native builds from a folder",
    "moepack/test_hub.py::test_eval_and_generate": "processes; test_load_by_hub_id",
    "moepack/pipeline/test_outline.py::test_bytes_of_released": "a model of 43 layers; test_shapes_agree",
    "moepack/reports/test_plan.py::test_the_command_plans_for_generate": "loads by the plan; test_the_command",
    "moepack/reports/test_plan.py::test_loading_takes": "a plan of another family; planning/test_fixed",
    "moepack/test_generation.py::test_the_commands": "processes; the other tests call what they call",
    "benchmarks/test_gpu_day.py::test_a_paged_model": "benchmarks' stages; runtime/residency/test_pinned",
    "benchmarks/test_gpu_day.py::test_promotions": "benchmarks' stages; runtime/residency/test_on_gpu",
    # Interpreted kernels of GPUs, 2 to 50 s each
    "runtime/test_decode_graph.py::test_replays_are_the_steps": "a captured step, interpreted for 50 s; changes rarely",
    "runtime/test_decode_graph.py::test_what_is_not_captured": "interpreted; test_graphs_kept",
    "runtime/kernels/test_exponent_triton.py::test_many_matrices": "interpreted; test_experts_that_slots_name",
    "runtime/test_compile.py::test_what_is_refused": "torch.compile traces a model for each refusal",
    "runtime/test_decode_graph.py::test_a_layer_is_few_operations": "counts a captured step's launches; changes rarely",
    "runtime/test_decode_graph.py::test_replays_of_latents": "captured steps, interpreted; change rarely",
    "runtime/test_decode_graph.py::test_replays_of_the_servers": "captured steps, interpreted; change rarely",
    "moepack/test_generation.py::test_a_chat_on_a_gpu": "interpreted; the other tests generate on the CPU",
    "runtime/dense/test_on_gpu.py::test_maps_of_one_input": "interpreted; test_every_encoding",
    # Products, and what the same code passes elsewhere
    "runtime/paging/test_in_place.py::test_the_same_bits": "paging/test_paging; test_steps_take_turns",
    "whole/test_quality.py::test_perplexity[shared]": "the larger model; the example's",
    "whole/test_quality.py::test_losses[shared]": "the larger model, which is built; the example's",
    "whole/test_quality.py::test_the_default_recipe_loses_less_at_equal_bytes": "two builds; pipeline/test_recipe",
    "whole/test_quality.py::test_better_than_rounding": "a build more; quantize/test_quantize",
    "moepack/reports/test_speed.py::test_a_plan_predicts": "every policy is replayed; the other tests predict one",
    "runtime/dense/test_file_rows.py::test_a_converted": "a model more; test_under_a_memory_limit",
    "runtime/planning/test_choice.py::test_it_is_the_same_everywhere": "every instruction set in turn",
    "whole/test_examples": "examples/ as scripts",
    "benchmarks/test_real.py::test_an_interrupted": "trains two models; `benchmarks.real --quick` runs every stage",
}

# Of these tests' cases `make test` runs those whose ids contain one of the words.
FEW: dict[str, tuple[str, ...]] = {
    "runtime/kernels/test_affine_triton.py::test_every_width_and_group": ("[w3-3-32]",),
    "runtime/kernels/test_affine_triton.py::test_released_weights_are_the": ("[nvfp4-16]", "[mxfp4-32]"),
    "runtime/kernels/test_affine_triton.py::test_many_tokens_of_every_width": (
        "[True-w4-4-128]", "[False-w1-1-32]", "[False-t2d3-3-128]",
    ),
    "runtime/kernels/test_affine_triton.py::test_few_tokens_weights": ("[w3-3-32]",),
    "runtime/kernels/test_affine_triton.py::test_one_launch_for_all": ("[gated-False]",),
    "runtime/test_decode_graph.py::test_the_table_of": ("[DeepSeek-V3]",),
    "runtime/kernels/test_attend_triton.py::test_it_is_attention": ("[3-2-1-32-dtype0]",),
    "runtime/dense/test_on_gpu.py::test_every_encoding": ("[w4-64]", "[fp8row-0]"),
    "runtime/residency/test_on_gpu.py::test_caches_on_demand": ("[lru:hi=w4,lo=absent-zeros]",),
    "runtime/planning/test_fixed.py::test_headroom_is": ("[deepseek_v3-16]", "[gpt_oss-k8v4]"),
    "moepack/server/test_packed_cache.py::test_answers_are": (
        "[qwen3_moe-16]", "[deepseek_v3-16]", "[qwen3_next-16]", "[gpt_oss-8]", "[deepseek_v3-k8v4]",
    ),
    "runtime/planning/test_fixed.py::test_the_arena_is": ("shape0",),
    # Families that differ in kind
    "whole/test_every_family.py::test_what_comes_of_it": (
        "[deepseek_v3]", "[gpt_oss]", "[qwen3_next]", "[granitemoehybrid]",
    ),
    "whole/test_native.py::test_from_checkpoint": ("[fp8 blocks]", "[modelopt nvfp4]", "[deepseek mxfp4]", "[gptq]"),
    "whole/test_native_served.py::test_paging_gives": ("[fp8 blocks-torch.bfloat16]", "[gptq-torch.float32]"),
    "runtime/kernels/test_routing_triton.py::test_every_form": ("v3-torch.bfloat16]", "[qwen3-torch.float32]"),
    "moepack/export/test_compressed.py::test_the_library": ("[4-integer]",),
    "moepack/pipeline/test_dense.py::test_families": ("[deepseek_v3]",),
    "moepack/server/test_kept_states.py::test_any_mix": ("[4]",),
    "moepack/server/test_policies.py::test_requests_at_once": (
        "[importance:", "[hotness:interval=0.05-True]", "[paged-False]",
    ),
    "runtime/dense/test_selection.py::test_generation": ("[glm_moe_dsa]", "[deepseek_v32]"),
    "runtime/paging/test_paging.py::test_the_same_bits": ("[-0]", "-300000]"),
    "runtime/planning/test_skeleton.py::test_attention_without": ("[qwen3_moe-",),
    "runtime/test_passes.py::test_what_a_pass_returns": ("[attentions]", "[a loss]"),
    "runtime/paging/test_in_place.py::test_an_interrupted": ("[record]",),
    "runtime/paging/test_paging.py::test_families": ("[gpt_oss]",),
    "runtime/planning/test_skeleton.py::test_leaving_out_repeated": ("[glm4_moe-3]",),
    "runtime/test_compile.py::test_a_whole_graph": ("[hotness]",),
    "whole/test_native.py::test_dense_matrices_stay": ("[fp8 blocks]",),
    "moepack/pipeline/test_identity.py::test_a_stopped_calibrate": ("[1-False-again0]",),
    "runtime/residency/test_sequences.py::test_guesses": ("[lookup]",),
    "runtime/planning/test_skeleton.py::test_kv_bytes": ("[gpt_oss]", "[qwen3_next]"),
    "pack/test_exponent.py::test_mutated": ("[attack-1-1]",),
    # Each shape of a model with each kind of budget
    "whole/test_combinations.py::test_every_way_gives_the_same": (
        "[static-None-False-w8-16]", "[static:allocation-least-False-w4-8]", "[hotness-3000000-True-None-k8v4]",
        "[lru-3000000-False-w8-k8v4]", "[paged-3000000-True-None-k8v4]", "[importance-3000000-False-w8-16]",
    ),
    "whole/test_combinations.py::test_every_dtype": ("None-static-torch.float16", "w4-paged-torch.bfloat16"),
    "runtime/policies/test_every_policy.py::test_serves": (
        "experts-hotness]", "biases-lru]", "attention-paged]", "experts-importance]", "attention-prefill]",
    ),
    "whole/test_native_served.py::test_every_policy": ("blocks-static]", "mxfp4-hotness]", "mxfp4-paged]"),
}  # fmt: skip

# What `.ci/run` repeats with AVX2 alone, and without even that: it compares numbers that compiled loops or torch's
# products make. Kernels of GPUs are interpreted by NumPy, and formats, manifests, pages and processes have no numbers
# that an instruction set changes: they are not repeated.
NUMERIC: tuple[str, ...] = (
    "calibrate/test_calibrate", "calibrate/test_some_experts", "calibrate/test_widened", "moepack/pipeline/test_dense",
    "moepack/reports/test_evaluate", "moepack/server/test_packed_cache", "moepack/server/test_policies",
    "pack/test_exponent", "quantize/",
    "runtime/dense/test_borrowed", "runtime/dense/test_linears", "runtime/dense/test_norms",
    "runtime/dense/test_projections", "runtime/experts/", "runtime/kernels/test_affine_native",
    "runtime/kernels/test_by_torch", "runtime/kernels/test_dense_product",
    "runtime/kernels/test_fixed_products", "runtime/kernels/test_token_native",
    "runtime/kv/", "runtime/policies/test_every_policy", "runtime/residency/test_under", "runtime/test_load",
    "runtime/test_passes", "whole/test_combinations", "whole/test_encodings", "whole/test_families",
)  # fmt: skip

FULL_FILES = tuple(f"{name}.py" for name in FULL if "::" not in name)


def is_full(name: str) -> bool:
    """Whether these tables leave a test to `make test-all`; `name` is its node id below tests/, with its case."""
    if name.startswith(tuple(FULL)):
        return True
    test, _, case = name.partition("[")
    for prefix, words in FEW.items():
        if test.startswith(prefix):
            return not any(word in f"[{case}" for word in words)
    return False


def check_few(names: Sequence[str]):
    """Raise UsageError where FEW leaves out more than it says: no case has a word of it, or a test has no case left.

    `names` are of all cases of some files.
    """
    for prefix, words in FEW.items():
        cases = [(test, f"[{case}") for test, _, case in (n.partition("[") for n in names) if test.startswith(prefix)]
        for word in words if cases else ():
            if not any(word in case for _, case in cases):
                raise pytest.UsageError(f"tests/helpers/suites.py: no case of {prefix} has {word} in its id")
        for test in {test for test, _ in cases} - {test for test, case in cases if any(w in case for w in words)}:
            raise pytest.UsageError(f"tests/helpers/suites.py: {prefix} leaves no case of {test}")
