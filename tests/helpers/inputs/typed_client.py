"""A program that uses moepack's public names, for a type checker: test_packaging.py checks it, and nothing runs it."""

from pathlib import Path
from typing import assert_type

import moepack
from moepack import BudgetExceeded, BundleError, InputError, MoepackError
from moepack.pack.reader import Bundle
from moepack.pipeline.assemble import BuildReport
from moepack.runtime.served_model import ServedModel


def read(path: Path) -> list[str]:
    """The names of a bundle's versions."""
    bundle = moepack.open(path)
    assert_type(bundle, Bundle)
    return [version.name for version in bundle.versions]


def build(checkpoint: str, path: Path) -> int:
    """The tokens that a new bundle is calibrated on."""
    report = moepack.build(checkpoint, path, recipe="default")
    assert_type(report, BuildReport)
    return report.calibration_tokens


def serve(path: str, size: str) -> dict[str, int]:
    """How many experts each version has."""
    try:
        model = moepack.load(path, policy="hotness", device_memory=size, kv_tokens=64, all_logits=False)
    except BudgetExceeded as error:
        raise SystemExit(str(error)) from error
    except (BundleError, InputError) as error:
        assert isinstance(error, MoepackError)
        raise
    assert_type(model, ServedModel)
    with model.moepack as serving:
        print(serving.policy, serving.resident_bytes() + 1, serving.counters()["promotions"], serving.health()["ok"])
        return serving.by_version


def wrong(path: str) -> None:
    """What a type checker finds: without it, these comments would be errors of their own."""
    moepack.load(path, polcy="hotness")  # type: ignore[call-arg]
    moepack.load(path, batch="2")  # type: ignore[arg-type]
    moepack.lod(path)  # type: ignore[attr-defined]
    print(moepack.open(path).version)  # type: ignore[attr-defined]


print(f"moepack {moepack.__version__}", read, build, serve, wrong)
