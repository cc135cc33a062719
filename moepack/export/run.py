"""Export a bundle to a target: choose the versions, check them, write beside the output, and rename."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from moepack.pack.errors import InputError
from moepack.shared.progress import SILENT, Reporter

from .beside import identity, libraries, open_for
from .checkpoint import export_checkpoint
from .choice import Wanted, choose, expected_loss
from .files import ExportDirectory, working
from .report import Exported
from .targets import ExportJob, Target, target_of


def export(
    path: str | Path,
    output: str | Path,
    to: str = "checkpoint",
    wanted: Wanted | None = None,
    dry_run: bool = False,
    reporter: Reporter = SILENT,
) -> Exported:
    """Write the bundle at `path` in another program's form into the new directory `output`.

    Without `wanted`, "checkpoint" is the released one, byte for byte. A dry run checks all that can be refused before
    weights are read, and writes nothing. An export that was stopped goes on, if it is asked for the same of the same
    bundle; there is nothing at `output` until it is whole.

    Raises:
        InputError: for what the bundle does not have, or the target cannot hold.
        BundleError: for a damaged bundle.
        TargetError: if `output` is not new or empty, or in the bundle.
    """
    target = Path(output)
    wanted = wanted or Wanted()
    if to == "checkpoint" and wanted.nothing:
        return export_checkpoint(path, output, reporter, dry_run)
    bundle = open_for(path, target)
    form = target_of(to, wanted.lossy)
    job = choose(bundle, form, wanted)
    for note in form.notes(job):
        reporter.note(note)
    if dry_run:
        if wanted.lossy is not None:
            raise InputError("--dry-run and --lossy: what llama.cpp makes has its size then: leave one out")
        return _report(job, form, target, form.file_bytes(job), [])
    with working(target, made_for(job, form), form.file_bytes(job), reporter) as work:
        files = form.write(job, work, reporter)
        paths = [work.path(ExportDirectory.FILES, name) for name in files]
        written = sum(path.stat().st_size for path in paths)
        lost = form.lost(job, paths, reporter)
    reporter.step("done")
    made = _report(job, form, target, written, files)
    return made if lost is None else replace(made, lost=lost, bits=lost.bits)


def made_for(job: ExportJob, form: Target) -> dict[str, object]:
    """Everything that the bytes of an export depend on."""
    return {
        "target": repr(form),
        "bundle": identity(job.bundle),
        "libraries": libraries(*form.libraries),
        "experts": job.experts,
        "dense": [v.name for v in job.dense],
        "scales": job.scales,
        "shard": job.shard,
    }


def _report(job: ExportJob, form: Target, target: Path, size: int, files: list[str]) -> Exported:
    bits = 8 * form.expert_bytes(job) / job.bundle.expert_weights
    counts = dict(Counter(name for row in job.experts for name in row))
    dense = tuple(dict.fromkeys(v.name for v in job.dense))
    return Exported(form.name, target, size, bits, tuple(files), form.exact(job), expected_loss(job), counts, dense)
