"""The report of a dry run, and the table that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moepack.pack.spec import encoding_of
from moepack.shared.progress import duration

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated cost of a build."""

    versions: dict[str, int]  # bytes of each version's files, exact
    dense_bytes: int  # bytes of all other tensors, exact, without dense matrices that have versions
    work_bytes: int  # the most bytes in the work directory, without the bundle; approximate
    memory: dict[str, int]  # bytes by use in the step that takes the most, approximate; the peak is their sum
    seconds: dict[str, float]  # by kind of work, approximate
    experts: int
    layers: int
    dense_versions: dict[str, int] = field(default_factory=dict)  # bytes of each dense version's files, exact
    batch_size: int = 0  # windows that go through a layer together
    on_disk: str = ""  # `MemoryPlan.on_disk`
    checkpoint_bytes: int = 0  # of the checkpoint's tensors as released; 0 where nothing tells
    carried_bytes: int = 0  # of tensors that the bundle keeps as they are for `moepack export` alone, exact
    # What tells the shapes where the weights were not read ("config.json alone"); empty if they were. Bytes of
    # entropy-coded versions are then approximate.
    outline: str = ""


def render(e: Estimate) -> Table:
    """Render the estimate as a table."""
    from rich.table import Table

    table = Table("what", "how much", title=f"a build of {e.experts} experts in {e.layers} layers")
    whole = sum(e.versions.values()) + sum(e.dense_versions.values()) + e.dense_bytes + e.carried_bytes
    rows = {"shapes are those of": e.outline} if e.outline else {}
    rows |= {"checkpoint, bytes": f"{e.checkpoint_bytes:,}"} if e.checkpoint_bytes else {}
    rows |= {f"{name}, bytes": _bytes(e, name, size) for name, size in e.versions.items()}
    rows |= {f"dense {name}, bytes": _bytes(e, name, size) for name, size in e.dense_versions.items()}
    rows |= {"for moepack export alone, bytes": f"{e.carried_bytes:,}"} if e.carried_bytes else {}
    about = "about " * bool(e.outline)
    rows |= {"dense tensors, bytes": f"{about}{e.dense_bytes:,}", "bundle, bytes": f"{about}{whole:,} and its tables"}
    rows["work directory, at most about"] = f"{e.work_bytes / 2**30:,.1f} GiB more"
    rows |= {f"memory, {part}": f"{size / 2**20:,.0f} MiB" for part, size in e.memory.items()}
    rows["memory, peak about"] = f"{sum(e.memory.values()) / 2**20:,.0f} MiB"
    rows["windows a batch"] = f"{e.batch_size}"
    rows |= {"on disk meanwhile": e.on_disk} if e.on_disk else {}
    rows |= {f"time, {part}": f"{took:,.1f} s" for part, took in e.seconds.items()}
    rows["time, all about"] = duration(sum(e.seconds.values()))
    for row in rows.items():
        table.add_row(*row)
    return table


def _bytes(e: Estimate, version: str, size: int) -> str:
    """Bytes of a version's files; "about" where only encoding would tell."""
    return f"{'about ' * bool(e.outline and encoding_of(version).entropy_coded)}{size:,}"
