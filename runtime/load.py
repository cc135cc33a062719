"""From a bundle to a transformers model that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.manifest import MANIFEST


def load(
    bundle: str | Path,
    device: str = "cpu",
    device_memory: int | None = None,
    policy: str | None = None,
    dtype: Any = "auto",
) -> Any:
    """Load a bundle as a transformers causal language model.

    Args:
        bundle: its directory, or a Hub id.
        device: where the model runs, as torch names it.
        device_memory: bytes that weights may take there; without it, no limit.
        policy: which version of each expert is served: `static:w4` (a version), `static:FILE.json` (a map),
            `static:allocation` (the map in the manifest). Without it, the most precise version that is here. In a
            budget also `uniform`, and two that change versions while serving: `hotness`, with options as
            `hotness:hi=bf16,lo=w2,interval=1` (policies.py, LiveOptions), and the baseline `lru`. The model's
            `moepack.close()` stops them; so does its end.
        dtype: of the dense tensors and the activations: a torch dtype, or "auto" for the checkpoint's own.

    Raises:
        BundleError: when the bundle is damaged.
        InputError: when the policy does not fit it, or the memory does not suffice.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from .plugin import METHOD
    from .policies import parse_policy

    parse_policy(policy)
    path = Path(bundle)
    if path.exists() and not (path / MANIFEST).is_file():
        raise InputError(f"{path}: not a bundle: it has no {MANIFEST}; make one with moepack build")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device}: {str(error).splitlines()[0]}") from None
    try:
        config = AutoConfig.from_pretrained(bundle)
    except (OSError, ValueError) as error:
        raise InputError(f"{bundle}: neither a bundle nor one on the Hub: {str(error).splitlines()[0]}") from None
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != METHOD:
        raise InputError(f"{bundle}: its config does not say it is a moepack bundle")
    config.quantization_config.update(policy=policy, device_memory=device_memory)
    return AutoModelForCausalLM.from_pretrained(bundle, config=config, dtype=dtype, device_map=device)
