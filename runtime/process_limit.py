"""A memory limit of the whole process on a CPU: the budget, and what the process takes beside it.

The process is measured once its libraries are imported and the model's skeleton is made, before any weight is read.
What it takes later are constants that were measured. `load` sets the budget with it, and `moepack plan` shows it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version, align
from moepack.runtime.devices import glibc, torch_cuda
from moepack.runtime.experts import backends
from moepack.runtime.kv.forms import AUTO_KV, CONTEXT, FORMS
from moepack.runtime.planning.choice import choose_policy, ladders_of
from moepack.runtime.planning.decided import best_cache, decide, relative_loss
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.fixed import Fixed
from moepack.runtime.planning.matrices import kernels_read, ranges
from moepack.runtime.planning.measure import measure
from moepack.runtime.planning.options import AUTO, LoadOptions
from moepack.runtime.planning.plan import make_plan, unchanging
from moepack.runtime.planning.sizes import in_unit, parse_size
from moepack.runtime.policies.placements import ON_HOST
from moepack.runtime.policies.registry import Policy
from moepack.runtime.store.host_limit import most_memory, resident
from moepack.runtime.store.read_ahead import WAITING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("moepack.runtime")
CPU = torch.device("cpu")
MIB = 1 << 20
STEP = 16 * MIB  # a process's measure is rounded up to whole steps: it varies by some MB from run to run
LATER = 96 * MIB  # libraries and kernels that the first passes load and compile, and Python's objects
THREAD = 2 * MIB  # a thread's stack and heap, and what the kernel keeps for it
UNSEEN = 16 * MIB  # holes in the heap, and what the budget does not see (docs/memory.md)
HOLES = 0.03  # of the first HOLED bytes of a budget: holes in the heap, beside caches and activations
# Larger budgets hold experts, in maps of their own: 0 to 40 MB of holes were measured at 4.7 to 12.3 GB.
HOLED = 2 << 30
TABLES = 1 / 512  # of the budget: the page tables of small pages


@dataclass(frozen=True, slots=True)
class Beside:
    """The bytes that a process takes beside its budget, by use; holes and page tables grow with the budget."""

    process: int  # Python, libraries with their files' pages, the model without weights
    later: int = LATER  # libraries and kernels that are loaded on first use
    threads: int = 0
    read_ahead: int = WAITING  # extents read ahead of the loader
    unseen: int = UNSEEN  # holes in the heap, stacks

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(asdict(self).values())

    def limit(self, budget: int) -> int:
        """Return the most bytes of a process with a budget."""
        return self.total + budget + math.ceil(min(budget, HOLED) * HOLES + budget * TABLES)

    def budget(self, limit: int) -> int:
        """Return the largest budget of a process that takes at most `limit` bytes; 0 if there is none."""
        room = limit - self.total
        return max(0, math.floor(max(room / (1 + HOLES + TABLES), (room - HOLED * HOLES) / (1 + TABLES))))

    def described(self, budget: int, shown: Callable[[int], str] = "{} bytes".format) -> str:
        """Name every part in words, beside a budget; `shown` writes a size."""
        parts = (
            (self.process, "Python and libraries"),
            (self.later, "what they load later"),
            (self.threads, "threads"),
            (self.read_ahead, "read ahead"),
            (self.unseen + self.limit(budget) - budget - self.total, "heap holes and page tables"),
        )
        return ", ".join(f"{shown(size)} {name}" for size, name in parts)


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A limit that a model is served in."""

    bytes: int  # the most that the process may take
    budget: int
    beside: Beside

    def __str__(self) -> str:
        return f"memory limit of {self.bytes} bytes: {self.budget} bytes budget, {self.beside.described(self.budget)}"

    def too_small(self, bundle: Bundle, error: TooSmallError) -> TooSmallError:
        """Return the error of a budget in terms of the limit."""
        least = align(self.beside.limit(error.least), STEP) + STEP
        return TooSmallError(
            f"{bundle.path}: a memory limit of {self.bytes} bytes is too small: the least that would do is {least} "
            f"bytes: {error.least} bytes budget, {self.beside.described(error.least)}",
            least,
        )


def measured() -> Beside:
    """Measure the process as it is now."""
    glibc.bound()
    glibc.trim()
    threads = torch.get_num_threads() + torch.get_num_interop_threads()
    return Beside(align(sum(resident()), STEP), threads=threads * THREAD)


def limit_of(options: LoadOptions, beside: Beside) -> ProcessLimit:
    """Divide the memory limit of `options` into the budget and the rest.

    Raises:
        InputError: if the options' own budget does not fit.
    """
    limit = most_memory() if options.memory == AUTO else parse_size(options.memory)
    assert limit is not None
    most = beside.budget(limit)
    given = options.budget
    if given is not None and given > most:
        refusal = (
            f"a device memory of {given} bytes does not fit a memory limit of {limit} bytes: at most {most} bytes "
            f"do, beside {beside.described(most)}"
        )
        raise InputError(in_unit(refusal, options.device_memory))
    return ProcessLimit(limit, most if given is None else given, beside)


def check_policy(bundle: Bundle, policy: Policy) -> None:
    """Raise InputError for a policy that keeps experts in host memory, which no budget counts."""
    ladders = ladders_of(bundle, policy.options) if policy.is_live else []
    if any(p.where in ON_HOST for ladder in ladders for p in ladder):
        raise InputError(
            f"{bundle.path}: policy {policy} keeps experts in host memory beside the device's, which a limit of the "
            "process's memory does not count: give a device memory alone, or name another policy"
        )


def keep_limit(
    model: PreTrainedModel, bundle: Bundle, options: LoadOptions, dense: Sequence[Version]
) -> tuple[LoadOptions, ProcessLimit]:
    """Set the budget of a model whose weights are not read yet, by `options.memory`. `dense`: as in `attach`.

    Raises:
        InputError: if the options' own budget does not fit.
        TooSmallError: if the limit does not hold the model at its smallest versions, before any weight is read.
    """
    for form in FORMS if options.kv == AUTO_KV else [options.kv]:  # the code that it loads counts as the process's
        with contextlib.suppress(InputError):  # which the budget's check raises again
            _outside(model, bundle, replace(options, kv=form), dense)
    limit = limit_of(options, measured())
    policy = choose_policy(options.policy, bundle, ["cpu"], True)
    check_policy(bundle, policy)
    options = _with_cache(model, bundle, replace(options, device_memory=limit.budget), dense, policy)
    fixed = _outside(model, bundle, options, dense)
    try:
        _check_fits(bundle, policy, fixed, limit.budget)
        if (loading := fixed.dense + _twice(model, bundle, dense)) > limit.budget:
            raise TooSmallError(f"{bundle.path}: loading its dense tensors takes {loading} bytes", loading)
    except TooSmallError as error:
        raise limit.too_small(bundle, error) from None
    return options, limit


def check_budget(model: PreTrainedModel, bundle: Bundle, options: LoadOptions, dense: Sequence[Version]) -> LoadOptions:
    """Check on a CPU that the options' budget holds a model whose weights are not read yet. `dense`: as in `attach`.

    A model of another class than the bundle's own has other tensors: it is checked when they are there, and has a
    plain cache. Returns the options with the form of cache that `auto` stands for.

    Raises:
        TooSmallError: if the budget does not hold the model at its smallest versions.
    """
    known = type(model).__name__ == bundle.manifest.model["architecture"]
    if options.budget is None or not known or torch_cuda.is_gpu(CPU):
        return options
    policy = choose_policy(options.policy, bundle, ["cpu"], True)
    options = _with_cache(model, bundle, options, dense, policy)
    assert options.budget is not None
    _check_fits(bundle, policy, _outside(model, bundle, options, dense), options.budget)
    return options


def _with_cache(
    model: PreTrainedModel, bundle: Bundle, options: LoadOptions, dense: Sequence[Version], policy: Policy
) -> LoadOptions:
    """Return the options with the form of cache that `auto` stands for in their budget."""
    from moepack.runtime.kv.growing import forms_of  # which imports transformers

    if options.kv != AUTO_KV:
        return options
    budget = options.budget
    assert budget is not None

    def experts_lose(form: str) -> float:
        asked = replace(options, kv=form, kv_tokens=options.kv_tokens or CONTEXT)
        held = decide(bundle, policy, _outside(model, bundle, asked, dense), budget, on_gpu=False, host=None)
        return relative_loss(bundle.calibration(), held.table)[0]

    compiled = backends.backend(CPU) == "native"
    best = best_cache(forms_of(model, compiled), experts_lose)
    log.info("%s: kv=%s loses least in this budget", bundle.path, best)
    return replace(options, kv=best)


def _outside(model: PreTrainedModel, bundle: Bundle, options: LoadOptions, dense: Sequence[Version]) -> Fixed:
    """Measure a model whose weights are not read yet; return its bytes beside experts."""
    needs = measure(bundle, model.config, model.dtype, CPU, options.workload, dense)
    return needs.fixed(options.memory is not None)


def _check_fits(bundle: Bundle, policy: Policy, fixed: Fixed, budget: int) -> None:
    if policy.is_live:
        make_plan(bundle, policy.options, fixed.total, budget)
    else:
        unchanging(bundle, policy, fixed, budget)


def _twice(model: PreTrainedModel, bundle: Bundle, dense: Sequence[Version]) -> int:
    """Return the bytes of the largest dense matrix that is in memory twice while it is loaded.

    A coded one is decoded from its extent; one that the bundle has no versions of is moved to where kernels read it.
    """
    places = [(v, *bundle.dense_place(i)) for i, v in enumerate(dense) if v.entropy_coded]
    sizes = [bundle.dense_file(v.name, layer).extent_size(at) for v, layer, at in places]
    moved = ranges(model, bundle, dense, kernels_read()).moved
    return max([*sizes, *(m.weights * model.dtype.itemsize for m, _ in moved.values())], default=0)
