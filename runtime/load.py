"""Load a bundle as a transformers model that serves it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import CODE_ERRORS, InputError, MoepackError, in_a_line
from moepack.pack.hub_errors import in_one_line, patiently, reason
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import DENSE, MANIFEST
from moepack.pack.reader import Bundle, open_bundle
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.planning.choice import ladders_of
from moepack.runtime.planning.options import GENERATION, METHOD, LoadOptions, on_cpu
from moepack.runtime.profile import read_profile

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from .served_model import ServedModel


def load(
    bundle: str | Path,
    device: str = "cpu",
    device_memory: int | str | None = None,
    policy: str | None = None,
    dtype: str | torch.dtype = "auto",
    kv_tokens: int = GENERATION["kv_tokens"],
    batch: int = GENERATION["batch"],
    prefill_tokens: int = GENERATION["prefill_tokens"],
    all_logits: bool = GENERATION["all_logits"],
    host_memory: int | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    attn_implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    host_rate: int | str | None = None,
    host_threads: int | None = None,
    dense: str | None = None,
    max_tpot: str | int | None = None,
    memory: int | str | None = None,
    profile: str | None = None,
    checked: bool | None = None,
    kv: str | int | None = None,
) -> ServedModel:
    """Load a bundle as a transformers causal language model. Deleting it or `model.moepack.close()` stops its threads.

    `model.moepack` says what is served (moepack.runtime.serving.Serving).

    Args:
        bundle: a directory, or a Hub id, of which the versions that the policy may serve are fetched.
        progress: called while weights are read, with the bytes read so far and the bytes in all, as far as known.

    `moepack.runtime.planning.options.LoadOptions` describes the other arguments. In a budget, the workload by default
    is that of `moepack generate` and `moepack plan`: a prompt of 512 tokens and 64 new ones, without all logits.

    Raises:
        BundleError: when the bundle is damaged.
        InputError: for an invalid argument, or a policy that does not fit the bundle.
        BudgetExceeded: when there is too little memory; it says how much is enough, and is also an InputError and
            torch's OutOfMemoryError.
    """
    options = LoadOptions(
        device=device,
        device_memory=device_memory,
        policy=policy,
        dtype=dtype,
        kv_tokens=kv_tokens,
        batch=batch,
        prefill_tokens=prefill_tokens,
        all_logits=all_logits,
        host_memory=host_memory,
        host_rate=host_rate,
        host_threads=host_threads,
        revision=revision,
        token=token,
        attn_implementation=attn_implementation,
        dense=dense,
        max_tpot=max_tpot,
        memory=memory,
        profile=profile,
        checked=checked,
        kv=kv,
    )
    model: ServedModel = load_bundle(bundle, options, progress)
    return model


def load_bundle(bundle: str | Path, options: LoadOptions, progress: Callable[[int, int], None] | None = None) -> Any:
    """Load a bundle as `load` does, with its options in one record."""
    check_bundle(bundle, options)

    import torch

    from moepack.runtime.planning.exceeded import TooSmallError
    from moepack.runtime.store.loading import loading_report

    check_device(options.device)
    _check_kernels(options.device)
    if torch.get_default_device().type == "meta":
        raise InputError("moepack.load loads weights, which torch.device('meta') does not hold: call it outside")
    config, kind = _config(bundle, options)
    config.quantization_config.update(options.served())
    named: dict[str, Any] = {"revision": options.revision or "main", "token": options.token}
    if options.attn_implementation is not None:
        named["attn_implementation"] = options.attn_implementation
    with loading_report(progress):
        dtype = options.torch_dtype
        device = options.device
        try:
            return from_pretrained(kind, bundle, config=config, dtype=dtype, device_map=device, **named)
        except TooSmallError as error:
            raise error.like(options.size) from None


def _check_kernels(device: str) -> None:
    """Raise InputError for an AMD GPU: the experts' kernels take more shared memory (docs/gpu.md)."""
    import torch

    if torch.version.hip is None or on_cpu(device):
        return
    name = torch.cuda.get_device_properties(torch.device(device)).gcnArchName.partition(":")[0]
    raise InputError(
        f"device {device}: the experts' kernels need more shared memory than {name} has: serve with --device cpu"
    )


def _config(bundle: str | Path, options: LoadOptions) -> tuple[Any, Any]:
    """Return the configuration of a bundle, and its model class."""
    from moepack.families.model_class import auto_class
    from moepack.runtime.planning.config import read_config

    manifest = open_bundle(bundle).manifest if Path(bundle).exists() else None
    config = read_config(bundle, manifest, revision=options.revision, token=options.token)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != METHOD:
        raise InputError(f"{bundle}: its config does not say it is a moepack bundle")
    try:
        return config, auto_class(config)
    except ValueError as error:
        raise InputError(f"{bundle}: {error}") from None


def from_pretrained(
    kind: Any, name: str | Path, revision: str = "main", token: str | bool | None = None, **options: Any
) -> Any:
    """Load a bundle or a checkpoint with a model class of transformers.

    Raises:
        InputError: where transformers' code rejects the configuration or the generation configuration, or the Hub
            refuses a file.
    """
    import torch

    generation = _generation_config(name, revision, token)
    try:
        return kind.from_pretrained(name, generation_config=generation, revision=revision, token=token, **options)
    except (MoepackError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if not Path(name).exists():  # transformers may take a refusal for a missing file
            on_hub(str(name), DENSE, instead="", revision=revision, token=token)
        raise InputError(f"{name}: {reason(error)}") from error
    except CODE_ERRORS as error:
        raise InputError(f"{name}: transformers cannot build its model: {in_a_line(error)}") from error
    except Exception as error:  # of the HTTP library, whose errors are no OSErrors
        if Path(name).exists():
            raise
        raise InputError(f"{name}: {reason(error)}") from error


def _generation_config(name: str | Path, revision: str, token: str | bool | None) -> GenerationConfig | None:
    """Return a model's generation configuration; None without one, and in offline mode where the cache has none."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    here = Path(name)
    with in_one_line(str(name)):
        if here.exists():
            has_one = (here / GENERATION_CONFIG_NAME).exists()
        else:
            has_one = _has_on_hub(str(name), GENERATION_CONFIG_NAME, revision, token)
    try:
        return GenerationConfig.from_pretrained(name, revision=revision, token=token) if has_one else None
    except Exception as error:  # the file may hold anything, or not be readable
        raise InputError(
            f"{name}: transformers does not take its {GENERATION_CONFIG_NAME}: {in_a_line(error)}"
        ) from error


def _has_on_hub(repo: str, file: str, revision: str, token: str | bool | None) -> bool:
    """Download a file; return whether the repository has it, or in offline mode the cache.

    Without an answer of the Hub, the cache may say that the repository lacked it.
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        patiently(partial(hf_hub_download, repo, file, revision=revision, token=token))
    except LocalEntryNotFoundError:
        lacked = try_to_load_from_cache(repo, file, revision=revision) is _CACHED_NO_EXIST
        if lacked or constants.HF_HUB_OFFLINE:
            return False
        raise
    except EntryNotFoundError:
        return False
    return True


def check_bundle(name: str | Path, options: LoadOptions) -> None:
    """Check that `name` is a bundle on disk or on the Hub; a bundle on disk must have the versions of the options.

    Imports neither torch nor transformers.

    Raises:
        BundleError: when the bundle is damaged.
        InputError: when `name` is not a bundle, or lacks a version that the options name.
    """
    path = Path(name)
    options.with_environment().parsed_policy()
    held = (path / MANIFEST).is_file()
    if not path.exists():
        held = on_hub(str(name), MANIFEST, revision=options.revision, token=options.token) is not None
    if not held:
        raise InputError(f"{name}: not a bundle: it has no {MANIFEST}; make one with moepack build")
    if path.exists():
        bundle = open_bundle(path)
        bundle.check()  # before transformers reads them
        check_options(bundle, options)


def check_options(bundle: Bundle, options: LoadOptions) -> None:
    """Raise InputError if a bundle lacks a version that the options or the environment name. Reads no weights."""
    options = options.with_environment(bool(bundle.manifest.dense))
    policy = options.parsed_policy()
    choose_dense(options.dense, bundle, options.policy)
    if options.profile is not None:
        read_profile(options.profile, bundle)
    if options.policy is None:
        return
    if policy.is_live:
        ladders_of(bundle, policy.options)
    elif policy.entry.versions is not None and not policy.entry.needs_budget:
        policy.entry.versions(bundle, policy.options, None)


def check_device(device: str) -> None:
    """Raise InputError unless a device is available."""
    if device == "cpu":
        return  # without importing torch: other mistakes are then reported sooner
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device}: {meant_device(device)}{str(error).splitlines()[0]}") from None


def meant_device(device: str) -> str:
    """Ask for the device that a name of no device may mean; nothing for others."""
    meant = {"gpu": "cuda", "nvidia": "cuda", "processor": "cpu"}.get(str(device).lower().partition(":")[0])
    return f"did you mean {meant}? " if meant else ""
