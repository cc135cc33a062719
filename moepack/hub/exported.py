"""`pull --for`: fetch what an export to a program needs of a bundle, and export it. The bundle is not kept.

The export is that of `moepack.export`, which also decides what can be exported. Here it is asked before most weights
are fetched: of each version that it may choose, the first layer says whether zero points will do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moepack.export import Wanted, export
from moepack.export.choice import SHARD, choose, named
from moepack.export.report import Exported
from moepack.export.targets import ExportJob, Target, target_of
from moepack.pack.errors import InputError
from moepack.pack.manifest import LEFTOVERS
from moepack.pack.reader import TENSORS, Bundle, open_bundle
from moepack.pack.spec import Version, expert_file, lossless
from moepack.pack.tables import TABLES
from moepack.pack.writer import check_target
from moepack.pipeline.released import TENSORS as DESCRIPTION
from moepack.shared.progress import SILENT, Reporter

from .download import Chooser, Fetch, pull
from .remote import Remote

# A program, and the target of an export that it reads. transformers gets every weight in BF16: of codes it reads
# symmetric ones of one width alone, and GPTQ's only with gptqmodel.
PROGRAMS = {"vllm": "compressed-tensors", "transformers": "checkpoint", "llama.cpp": "gguf"}


def pull_for(
    repo: str,
    output: str | Path,
    program: str,
    wanted: Wanted | None = None,
    revision: str | None = None,
    reporter: Reporter = SILENT,
) -> Exported:
    """Fetch the versions that an export needs, and write it into the new directory `output`.

    They are fetched into a hidden directory beside `output`, from which a second run continues a stopped one. It is
    removed at the end, and when the export is refused.

    Args:
        repo: OWNER/NAME.
        output: the export's directory.
        program: one of PROGRAMS.
        wanted: what to export; for transformers by default the checkpoint as it was released.
        revision: a branch, tag or commit.
        reporter: receives progress.

    Raises:
        InputError: for what the bundle does not have, or the program cannot read.
        TargetError, BundleError, HubError: as `pull` and `export` do.
    """
    if program not in PROGRAMS:
        raise InputError(f"--for {program}: there are {', '.join(PROGRAMS)}")
    form = target_of(PROGRAMS[program])
    wanted = wanted or Wanted()
    target = Path(output)
    check_target(target)
    beside = target.absolute().with_name(f".{target.absolute().name}.pulled")
    with _in_words_of(repo, beside):
        dense = (wanted.dense,) if wanted.dense else ()
        found: list[str] = []
        chooser = _chooser(form, wanted, program, reporter, found)
        pull(repo, beside, revision=revision, reporter=reporter, dense=dense, chooser=chooser)
        try:
            if wanted.fit is not None:
                _check(open_bundle(beside), form, found)
            made = export(beside, target, form.name, wanted, reporter=reporter)
        except InputError:
            shutil.rmtree(beside)
            raise
    shutil.rmtree(beside)
    return made


@contextmanager
def _in_words_of(repo: str, beside: Path) -> Iterator[None]:
    """Let refusals of an export name what the user named: programs and the repository."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for other, target in PROGRAMS.items():
            text = text.replace(f"--to {target}", f"--for {other}")
        for path in (beside / ".pulling" / "files", beside):
            text = text.replace(str(path), repo)
        raise InputError(text) from error


def _check(bundle: Bundle, form: Target, found: Sequence[str]) -> None:
    """Raise InputError for a version that its first layer promised: `export` would fit other ones in."""
    for name in found:
        if why := form.refusal(bundle, bundle.manifest.version(name)):
            raise InputError(f"--to {form.name}: {name} is not exported: {why}; or name another width by --bits")


def _chooser(form: Target, wanted: Wanted, program: str, reporter: Reporter, found: list[str]) -> Chooser:
    """Chooses what `export` will choose; `found` is filled with it."""

    def chosen(remote: Remote, fetch: Fetch) -> Sequence[str]:
        candidates = _candidates(remote, form, wanted, program)
        names = [name for name in remote.manifest.files if name != LEFTOVERS]
        described = fetch([name for name in names if not name.endswith(TENSORS) or name == TABLES])
        if wanted.nothing:
            return [v.name for v in candidates]
        form.check_model(ExportJob(described, wanted.scales, SHARD, ()))
        if form.name != "checkpoint":  # which takes all zero points
            names += [expert_file(v.name, remote.manifest.layers[0].index) for v in candidates]
        names += remote.manifest.dense_files(wanted.dense)[:1] if wanted.dense else ()
        found[:] = [v.name for v in choose(fetch(names), form, wanted).used]
        reporter.note(f"{program} gets experts at {', '.join(found)}: fetching no other version")
        return found

    return chosen


def _candidates(remote: Remote, form: Target, wanted: Wanted, program: str) -> Sequence[Version]:
    manifest = remote.manifest
    here = remote.versions
    at = Path(f"{remote.repo} on the Hub")  # begins errors; no file of it is here
    bundle = Bundle(at, manifest, tuple(v for v in manifest.versions if v.name in here))
    can = [v for v in bundle.versions if form.refusal(bundle, v) is None]
    has = f"it has {', '.join(v.name for v in can)}" if can else f"it reads none of {', '.join(here)}"
    if wanted.nothing and form.name == "checkpoint":
        exact = lossless(bundle.versions)
        if exact is None or DESCRIPTION not in manifest.files:
            raise InputError(f"{at}: does not hold its checkpoint as it was released: say --bits: {has}")
        return [exact]
    if wanted.bits is None and (wanted.fit is None or not can):
        raise InputError(f"{at}: --for {program}: say at which width, by --bits or --fit: {has}")
    if wanted.bits is None:
        return can
    version = manifest.version(named(bundle, form, wanted.bits))
    if why := form.refusal(bundle, version):
        raise InputError(f"{at}: --for {program}: {version.name} is not exported: {why}")
    return [version]
