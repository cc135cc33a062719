"""From a bundle to a transformers model that serves it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moepack.pack.errors import CODE_ERRORS, InputError, MoepackError, in_a_line
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import MANIFEST
from moepack.pack.reader import open_bundle
from moepack.runtime.planning.sizes import DEVICE_MEMORY, parse_bound, parse_size, read_tier
from moepack.runtime.policies.registry import parse_policy

_loading = threading.RLock()  # transformers sets the default dtype and device of the whole process while it loads


def load(
    bundle: str | Path,
    device: str = "cpu",
    device_memory: int | str | None = None,
    policy: str | None = None,
    dtype: Any = "auto",
    kv_tokens: int = 0,
    batch: int = 1,
    prefill_tokens: int = 512,
    all_logits: bool = True,
    host_memory: int | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    attn_implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    host_rate: int | str | None = None,
    host_threads: int | None = None,
    dense: str | None = None,
    max_tpot: str | int | None = None,
) -> Any:
    """Load a bundle as a transformers causal language model.

    Args:
        bundle: its directory, or a Hub id, of which the versions that the policy may serve are fetched.
        device: where the model runs, as torch names it.
        device_memory: bytes, or a size such as "24GiB", that all of it may take there: weights, KV cache, activations,
            buffers; without it, no limit.
        policy: which version of each expert is served: `static:w4` (a version), `static:FILE.json` (a map),
            `static:allocation` (the map in the manifest). In a budget also `uniform` and `random`, and those that
            change versions while serving: `hotness`, with options as `hotness:hi=bf16,lo=w2,interval=1`
            (HotnessOptions); `prefill`, as `prefill:bits=2.5,k=8` (PrefillOptions), which has a prompt's busiest
            experts on the device and the host execute the others; `importance`, which holds no expert before it is
            needed: passes wait for what a layer lacks, fetched at two precisions by importance, and ahead
            (ImportanceOptions); `paged`, which serves `bf16` from compressed bytes, decoded while a layer runs
            (PagedOptions); and the baseline `lru`. docs/policies.md says which to choose. The model's
            `moepack.close()` stops them; so does its end. Without it, the most precise version that is here; in a
            budget `hotness`, or `uniform` where no version can change.
        dtype: of the dense tensors and the activations: a torch dtype, or "auto" for the checkpoint's own.
        kv_tokens: in a budget, tokens of KV cache a sequence that are held back from the start. Where more are needed
            experts are pushed out for them, and where that does not suffice the forward pass raises BudgetExceeded.
        batch: in a budget, how many sequences there are at a time.
        prefill_tokens: in a budget, tokens a sequence of the largest forward pass whose activations are held back
            from the start; 0 leaves activations out of the budget.
        all_logits: in a budget, whether such a pass returns the logits of all its tokens, as `model(ids)` does, or of
            the last alone, as `model.generate` needs them.
        host_memory: on a GPU, bytes of host memory that may be pinned for experts that come and go; without it, what
            the system has left, less a margin. Everywhere, what experts that the host executes may take of it.
        revision, token: of a bundle on the Hub, as transformers takes them.
        attn_implementation: as transformers takes it.
        progress: called while experts are loaded, with the bytes that are there and the bytes in all.
        host_rate: bytes a second, or a size such as "20GB", at which the host reads the experts that it executes (the
            policy `prefill`), to emulate slower memory than it has; without it, no limit.
        host_threads: on which it runs them; without it, all of torch's beside a GPU, half of them beside a CPU's own.
        dense: the version of the matrices outside the experts (attention, shared experts, lm_head), where the bundle
            has versions of them: `w8`, `bf16`, or `allocation`, which the manifest names. Without it the most precise
            that is here, and with the policy `static:allocation` what that names.
        max_tpot: the most that decoding a token may take: `50ms`, or bytes that it reads, as `2GB`. Versions
            with which the worst token would take longer are not served, by any policy.

    Raises:
        BundleError: when the bundle is damaged.
        InputError: when the policy does not fit it.
        BudgetExceeded: when the memory does not suffice, an InputError and torch's OutOfMemoryError; it names the least
            that would.
    """
    budget, pinned = parse_size(device_memory), parse_size(host_memory)  # what can be refused at once is
    rate, threads = read_tier(host_rate, host_threads)
    parse_bound(max_tpot)
    parse_policy(policy, budget is not None or bool(os.environ.get(DEVICE_MEMORY)))
    check_bundle(bundle, revision, token)
    opened = open_bundle(bundle) if Path(bundle).exists() else None
    if opened is not None:
        opened.check()  # before transformers reads them

    import torch

    from moepack.families.model_class import auto_class
    from moepack.runtime.planning.config import read_config
    from moepack.runtime.planning.fixed import Workload
    from moepack.runtime.store.read_ahead import loading_report

    from .plugin import METHOD

    workload = Workload(kv_tokens, batch, prefill_tokens, all_logits)
    check_device(device)
    if torch.get_default_device().type == "meta":
        raise InputError("moepack.load loads weights, which torch.device('meta') does not hold: call it outside")
    manifest = None if opened is None else opened.manifest
    config = read_config(bundle, manifest, revision=revision, token=token)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != METHOD:
        raise InputError(f"{bundle}: its config does not say it is a moepack bundle")
    try:
        kind = auto_class(config)
    except ValueError as error:
        raise InputError(f"{bundle}: {error}") from None
    config.quantization_config.update(
        policy=policy,
        device_memory=budget,
        workload=asdict(workload),
        host_memory=pinned,
        host_rate=rate,
        host_threads=threads,
        dense=dense,
        max_tpot=max_tpot,
    )
    options: dict[str, Any] = {"revision": revision or "main", "token": token}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with _loading, loading_report(progress):
        return from_pretrained(kind, bundle, config=config, dtype=dtype, device_map=device, **options)


def from_pretrained(kind: Any, name: str | Path, revision: str = "main", token: Any = None, **options: Any) -> Any:
    """What a model class of transformers makes of a bundle or a checkpoint.

    Raises:
        InputError: where transformers' code does not take its configuration, or what it says of generation.
    """
    import torch
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision, token=token)
    except OSError:  # there is none
        generation = None
    except Exception as error:  # it may hold anything
        raise InputError(
            f"{name}: transformers does not take its generation_config.json: {in_a_line(error)}"
        ) from error
    try:
        return kind.from_pretrained(name, generation_config=generation, revision=revision, token=token, **options)
    except (MoepackError, torch.OutOfMemoryError):
        raise
    except CODE_ERRORS as error:
        raise InputError(f"{name}: transformers does not make its model of it: {in_a_line(error)}") from error


def check_bundle(bundle: str | Path, revision: str | None = None, token: str | bool | None = None) -> None:
    """See that a name is a bundle's, on disk or on the Hub; nothing is read of it.

    Raises:
        InputError: when it is not.
    """
    path = Path(bundle)
    if path.exists():
        held = (path / MANIFEST).is_file()
    else:
        held = on_hub(str(bundle), MANIFEST, revision=revision, token=token) is not None
    if not held:
        raise InputError(f"{bundle}: not a bundle: it has no {MANIFEST}; make one with moepack build")


def check_device(device: str) -> None:
    """See that a device is here.

    Raises:
        InputError: when it is not.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device}: {str(error).splitlines()[0]}") from None
