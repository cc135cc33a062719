"""How a bundle is loaded and served: one record, passed from the command line or `moepack.load` down to `attach`.

This module imports neither torch nor transformers, so that a wrong value is refused before they load.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError
from moepack.runtime.kv.forms import AUTO_KV, FORMS, PLAIN_KV
from moepack.runtime.policies.registry import Policy, parse_policy

from .sizes import Bound, parse_bound, parse_size

if TYPE_CHECKING:
    import torch

METHOD = "moepack"  # the name of the quantisation method in transformers
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
# Environment variables
POLICY = "MOEPACK_POLICY"
DENSE = "MOEPACK_DENSE"
DEVICE_MEMORY = "MOEPACK_DEVICE_MEMORY"
MEMORY = "MOEPACK_MEMORY"
CHECKED = "MOEPACK_CHECKED"
AUTO = "auto"  # the memory limit that follows from what the control group and the system have left
WORKLOAD = ("kv_tokens", "batch", "prefill_tokens", "all_logits")
# The workload of `moepack.load` and `moepack plan`: `moepack generate` with a prompt of 512 tokens and 64 new ones.
GENERATION: dict[str, Any] = {"kv_tokens": 576, "batch": 1, "prefill_tokens": 512, "all_logits": False}
SERVED = (
    "policy",
    "dense",
    "max_tpot",
    "device_memory",
    "memory",
    "host_memory",
    "host_rate",
    "host_threads",
    "profile",
    "checked",
    "kv",
    *WORKLOAD,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """The load for which a budget reserves memory beside the experts."""

    kv_tokens: int = 0  # tokens of each sequence's KV cache, reserved while loading; more are reserved as needed
    batch: int = 1  # sequences at a time
    # Tokens of each sequence in the largest forward pass; 0 leaves activations out of the budget
    prefill_tokens: int = 512
    # Whether a pass returns the logits of all its tokens, or only the last token's, as when generating
    all_logits: bool = True
    kv: str = PLAIN_KV  # the form of the cache, of FORMS
    grows: bool = False  # whether caches beyond `kv_tokens` will come, for which experts should be able to make room

    def __post_init__(self) -> None:
        for name, least in (("kv_tokens", 0), ("batch", 1), ("prefill_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} is a whole number from {least}, not {value!r}")


def on_cpu(device: str) -> bool:
    """Whether a device, as torch names it, is the CPU."""
    return str(device).partition(":")[0] == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a bundle is loaded and served. Sizes are bytes, or text such as "24GiB".

    Attributes:
        device: where the model runs, as torch names it.
        device_memory: the most that weights, KV cache, activations and buffers may take there; `None` sets no limit.
        memory: on a CPU, the most that the whole process may take; "auto" takes what the control group and the system
            have left. The budget is the limit less what Python, libraries and threads take, or `device_memory` if that
            is given too and fits (runtime/process_limit.py).
        policy: which version of each expert is served. `static:w4` (a version), `static:FILE.json` (a map) and
            `static:allocation` (the map in the manifest) need no budget. In a budget also `uniform` and `random`, and
            the policies that change versions while serving: `hotness`, with options such as
            `hotness:hi=bf16,lo=w2,interval=1` (HotnessOptions); `prefill`, such as `prefill:bits=2.5,k=8`
            (PrefillOptions), keeps a prompt's busiest experts on the device and runs the others on the host;
            `importance` (ImportanceOptions) loads experts when a layer needs them, at two precisions by importance, and
            ahead of time; `paged` (PagedOptions) serves the lossless version, decoded or read while a layer runs; `lru`
            is a baseline. docs/policies.md compares them. `None` serves the most precise version present, or in a
            budget chooses `hotness`, or `uniform` if versions cannot change.
        dtype: the type of dense tensors and activations: a torch dtype or its name; "auto" for the checkpoint's own.
        kv_tokens: in a budget, tokens of KV cache reserved for each sequence from the start. When a sequence needs
            more, experts are evicted; if that is not enough, the forward pass raises BudgetExceeded.
        batch: in a budget, sequences at a time.
        prefill_tokens: in a budget, tokens of each sequence in the largest forward pass, whose activations are reserved
            from the start; 0 leaves activations out of the budget.
        all_logits: in a budget, whether the largest pass returns the logits of all its tokens, as `model(ids)` does, or
            only the last token's, as `model.generate` needs.
        host_memory: on a GPU, bytes of host memory that may be pinned for experts; `None` allows what the system has
            left, less a margin. On every device, the limit for experts that the host runs.
        host_rate: bytes a second at which the host reads the experts that it runs (policy `prefill`), to emulate slower
            memory; `None` sets no limit.
        host_threads: threads on which the host runs experts; `None` uses all of torch's with a GPU, half without.
        revision, token: for a bundle on the Hub, as in transformers.
        attn_implementation: as in transformers.
        dense: the version of the matrices outside the experts (attention, shared experts, lm_head), if the bundle has
            versions of them: `w8`, `bf16`, or `allocation`, which the manifest names. `None` chooses the most precise
            version present, or `allocation` with the policy `static:allocation`.
        max_tpot: the most that decoding one token may take, as time (`50ms`) or as bytes read (`2GB`). Versions with
            which the worst token would take longer are not served.
        profile: a file of `moepack profile` or `moepack serve --profile`: routing counts of the user's own traffic, in
            the place of calibration's. They decide which experts are there before the first token.
        kv: the bits of the KV cache: "16" keeps the model's own numbers; "8" and "4" keep codes, "k8v4" keys in 8 bits
            and values in 4. Latents have at least 8; layers with a window stay as they are. It needs a CPU with the
            compiled kernels. "auto" takes, in a budget on such a CPU, the form with which experts and a cache of
            `kv_tokens` together lose least; "16" elsewhere. docs/contexts.md says what each costs.
        checked: whether bytes whose digests this user has checked before are taken as checked while their file stays as
            it was (runtime/store/checked.py). Files that others may write are always digested.

    `kv_tokens`, `batch`, `prefill_tokens` and `all_logits` may be `None`: a command then sets its own (`filled`), and
    `Workload` has the defaults.

    Raises:
        InputError: for an invalid value, or a policy that does not exist.
    """

    device: str = "cpu"
    device_memory: int | str | None = None
    memory: int | str | None = None
    policy: str | None = None
    dtype: str | torch.dtype = "auto"
    kv_tokens: int | None = None
    batch: int | None = None
    prefill_tokens: int | None = None
    all_logits: bool | None = None
    host_memory: int | str | None = None
    host_rate: int | str | None = None
    host_threads: int | None = None
    revision: str | None = None
    token: str | bool | None = None
    attn_implementation: str | None = None
    dense: str | None = None
    max_tpot: str | int | None = None
    profile: str | None = None
    checked: bool | None = None
    kv: str | int | None = None

    def __post_init__(self) -> None:
        for name in ("device_memory", "host_memory", "memory", "host_rate"):
            size = getattr(self, name)
            if not (name == "memory" and size == AUTO):
                whole = parse_size(size)
                object.__setattr__(self, name, size if isinstance(size, str) else whole)  # numpy's numbers, for example
        self.check_limit(self.device)
        if parse_size(self.host_rate) == 0:
            raise InputError("host_rate must be at least 1 byte a second; leave it out for no limit")
        threads = self.host_threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise InputError(f"host_threads is a whole number from 1, not {threads!r}")
        parse_bound(self.max_tpot)
        for name in ("policy", "dense"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InputError(f"{name} is a text, not {value!r}")
        parse_policy(self.policy)
        if self.kv is not None and str(self.kv) not in (*FORMS, AUTO_KV):
            raise InputError(f"kv is one of {', '.join(FORMS)}, {AUTO_KV}, not {self.kv!r}")
        if self.kv == AUTO_KV and self.max_tpot is not None:
            raise InputError("kv=auto weighs losses, not a token's time: name the bits of kv beside max_tpot")
        _ = self.workload
        if isinstance(self.dtype, str) and self.dtype not in DTYPES:
            meant = SHORT.get(self.dtype.lower())
            guess = f"did you mean {meant}? " if meant else ""
            raise InputError(f"dtype {self.dtype!r} is unknown: {guess}there are {', '.join(DTYPES)}")

    @property
    def budget(self) -> int | None:
        """The budget in bytes that `device_memory` sets; `None` without one, or if only `memory` sets one."""
        return parse_size(self.device_memory)

    @property
    def size(self) -> int | str | None:
        """The budget or limit as the user wrote it."""
        return self.device_memory if self.device_memory is not None else self.memory

    def check_limit(self, device: str) -> None:
        """Raise InputError for a memory limit with another device than the CPU."""
        if self.memory is not None and not on_cpu(device):
            raise InputError(f"a memory limit is for a model on the CPU: on {device} give a device memory instead")

    @property
    def in_budget(self) -> bool:
        """Whether the model is served in a budget."""
        return self.device_memory is not None or self.memory is not None

    @property
    def bound(self) -> Bound | None:
        """The time or bytes that a token may take, from `max_tpot`; `None` for any."""
        return parse_bound(self.max_tpot)

    @property
    def workload(self) -> Workload:
        """The load for which a budget reserves memory."""
        given = {name: value for name in WORKLOAD if (value := getattr(self, name)) is not None}
        grows = self.kv_tokens == 0 and not self.all_logits  # others read texts without a cache
        return Workload(**given, kv=PLAIN_KV if self.kv in (None, AUTO_KV) else str(self.kv), grows=grows)

    @property
    def torch_dtype(self) -> str | torch.dtype:
        """`dtype` in the form that transformers accepts."""
        import torch

        return getattr(torch, self.dtype) if isinstance(self.dtype, str) and self.dtype != "auto" else self.dtype

    def served(self) -> dict[str, object]:
        """Return the fields that are set and that transformers does not know, for moepack's plug-in to transformers."""
        return {name: value for name in SERVED if (value := getattr(self, name)) is not None}

    def filled(self, **values: Any) -> LoadOptions:
        """Return a copy in which these values replace `None`."""
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})

    def with_environment(self, has_dense: bool = False) -> LoadOptions:
        """Return a copy in which MOEPACK_POLICY, _DENSE, _DEVICE_MEMORY, _MEMORY and _CHECKED replace `None`.

        These variables are for programs that load a bundle by its path. MOEPACK_DENSE is read only if the bundle has
        versions of its dense matrices (`has_dense`). Raises InputError for an invalid value.
        """
        sizes: dict[str, str | None] = {}
        for field, variable in (("device_memory", DEVICE_MEMORY), ("memory", MEMORY)):
            sizes[field] = os.environ.get(variable) or None
            try:
                self.filled(**{field: sizes[field]})
            except InputError as error:
                raise InputError(f"{variable}: {error}") from None
        policy = os.environ.get(POLICY) or None
        dense = os.environ.get(DENSE) or None if has_dense else None
        checked = True if os.environ.get(CHECKED, "") not in ("", "0") else None
        return self.filled(policy=policy, dense=dense, checked=checked, **sizes)

    def parsed_policy(self) -> Policy:
        """Return the policy that `policy` names, or the default, which depends on whether there is a budget.

        Raises:
            InputError: if the policy needs a budget and there is none.
        """
        return parse_policy(self.policy, self.in_budget)


DEFAULTS = LoadOptions()
