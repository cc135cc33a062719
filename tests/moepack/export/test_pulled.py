"""`pull --for`: from a stand-in Hub to what another program reads, with no more fetched than that needs."""

import filecmp
import json

import pytest
from hub_stand_in import point, serve, without_waits
from support import cli, ok, refused, tree

from moepack.export import Wanted, export
from moepack.hub import pull_for
from moepack.pack.errors import InputError


@pytest.fixture(scope="module")
def hub(tmp_path_factory, of_zeros):
    """Holds someone/symmetric and someone/fractional."""
    with serve() as (hub, address), pytest.MonkeyPatch.context() as patch:
        point(patch, address, tmp_path_factory.mktemp("hub"))
        for zeros in ("symmetric", "fractional"):
            hub.files[f"someone/{zeros}"] = tree(of_zeros(zeros))
        yield hub


def got(hub):
    """The layer files that were fetched since the last call, without the folder of the repository."""
    paths = {p.partition("/resolve/")[2].partition("/")[2] for m, p in hub.requests if m == "GET"}
    hub.requests.clear()
    return {p for p in paths if p.startswith(("experts/", "dense/"))}


def layers(version):
    return {f"experts/{version}/layer-{i:03d}.safetensors" for i in (0, 1)}


def same(one, other):
    names = sorted(tree(one))
    return names == sorted(tree(other)) and all(filecmp.cmp(one / n, other / n, shallow=False) for n in names)


CASES = {
    "vllm": ("--bits 2", Wanted("2"), "compressed-tensors", "w2"),
    "transformers": ("--bits 4 --dense w8", Wanted("4", dense="w8"), "checkpoint", "w4"),
    "llama.cpp": ("--bits w4", Wanted("w4"), "gguf", "w4"),
}


@pytest.mark.parametrize("program", CASES)
def test_it_is_the_export_of_the_bundle(program, hub, of_zeros, tmp_path):
    """Byte for byte, and one version of experts and of dense matrices is fetched for it."""
    options, wanted, target, version = CASES[program]
    got(hub)
    out = tmp_path / "out"
    said = json.loads(
        ok(cli("pull", "someone/symmetric", "-o", out, "--for", program, *options.split(), "--json", "-q"))
    )
    assert said["target"] == target and set(said["versions"]) == {version}
    dense = got(hub) - layers(version)
    assert {n.split("/")[1] for n in dense} == {wanted.dense or "bf16"} and all(n.startswith("dense/") for n in dense)
    export(of_zeros("symmetric"), tmp_path / "plain", target, wanted)
    assert same(out, tmp_path / "plain")
    assert {p.name for p in tmp_path.iterdir()} == {"out", "plain"}, "the bundle is not kept"


def test_transformers_gets_the_checkpoint_by_default(hub, of_zeros, short_model, tmp_path):
    got(hub)
    ok(cli("pull", "someone/fractional", "-o", tmp_path / "out", "--for", "transformers", "-q"))
    assert {n for n in got(hub) if n.startswith("experts/")} == layers("bf16")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (short_model / "model.safetensors").read_bytes()


def test_a_size_chooses_a_width_for_each_layer(hub, of_zeros, tmp_path):
    """The size is the export's. Of versions that are not chosen the first layer is looked at."""
    small, large = (
        export(of_zeros("symmetric"), tmp_path / "none", "compressed-tensors", Wanted(bits), dry_run=True).bytes
        for bits in ("4", "8")
    )
    got(hub)
    between = (small + large) // 2
    said = pull_for("someone/symmetric", tmp_path / "out", "vllm", Wanted(fit=str(between)))
    assert set(said.versions) == {"w4", "w8"} and small < said.bytes <= between
    looked_at = {f"experts/{v}/layer-000.safetensors" for v in ("w3", "w2")}
    assert {n for n in got(hub) if n.startswith("experts/")} == layers("w8") | layers("w4") | looked_at
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


REFUSALS = {
    "another program": ("symmetric", "--for sglang --bits 4", "--for sglang: there are vllm, transformers, llama.cpp"),
    "no width": ("symmetric", "--for vllm", "say at which width, by --bits or --fit: it has w8, w4, w3, w2"),
    "not its form": ("symmetric", "--for llama.cpp --bits 2", "on the Hub: --for llama.cpp: w2 is not exported: "),
    "no dense": ("symmetric", "--for vllm --bits 4 --dense w3", "has no version w3 of dense matrices: it has bf16, w8"),
    "zeros": ("fractional", "--for vllm --bits 4", "--for vllm: w4 is not exported: "),
    "of a bundle": ("symmetric", "--for vllm --bits 4 --versions w4", "chooses what it needs: leave --versions out"),
    "without": ("symmetric", "--bits 4", "--bits needs --for"),
    "too small": ("symmetric", "--for vllm --fit 1000", "--fit 1000: the smallest that is exported takes "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_line_and_leave_nothing(case, hub, tmp_path):
    """Before more than the first layer of one version is fetched; in the words that the user used."""
    repo, options, words = REFUSALS[case]
    got(hub)
    answer = cli("pull", f"someone/{repo}", "-o", tmp_path / "out", *options.split(), "-q")
    refused(answer, words)
    assert "--to " not in answer[2] and str(tmp_path) not in answer[2]
    looked_at = {
        f"experts/{v}/layer-000.safetensors" for v in (("w8", "w4", "w3", "w2") if "--fit" in options else ("w4",))
    }
    assert {n for n in got(hub) if n.startswith("experts/")} <= looked_at
    assert list(tmp_path.iterdir()) == []


def test_directories_of_others_are_left_alone(hub, tmp_path):
    """The output's, before anything is asked, and the hidden one's."""

    def pulled(repo, out):
        return cli("pull", f"someone/{repo}", "-o", tmp_path / out, "--for", "vllm", "--bits", "4", "-q")

    for name in ("full", ".out.pulled"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    hub.requests.clear()
    refused(pulled("symmetric", "full"), "not empty")
    assert not hub.requests
    refused(pulled("symmetric", "out"), ".out.pulled: is not empty")
    refused(pulled("none", "out"), "no such repository")
    assert tree(tmp_path) == {"full/mine": b"x", ".out.pulled/mine": b"x"}


def test_a_refusal_of_the_whole_version_removes_what_was_fetched(hub, tmp_path, monkeypatch):
    """What the first layer did not show: the other one's zero points."""

    def refuse(*_, **__):
        raise InputError(f"--to compressed-tensors: {tmp_path / '.out.pulled'}: w4 is not exported")

    monkeypatch.setattr("moepack.hub.exported.export", refuse)
    arguments = ["pull", "someone/symmetric", "-o", str(tmp_path / "out"), "--for", "vllm", "--bits", "4", "-q"]
    refused(cli(*arguments), "--for vllm: someone/symmetric: w4 is not exported")
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_one_goes_on(hub, tmp_path, monkeypatch):
    """What was fetched is not fetched again."""
    without_waits(monkeypatch)
    asked = []

    def cut(method, path):
        if method == "GET" and path.endswith("experts/w2/layer-001.safetensors"):
            asked.append(path)
            return True
        return False

    arguments = ["pull", "someone/symmetric", "-o", tmp_path / "out", "--for", "vllm", "--bits", "2", "-q"]
    hub.cut = cut
    try:
        refused(cli(*arguments))
    finally:
        hub.cut = None
    assert asked and not (tmp_path / "out").exists() and (tmp_path / ".out.pulled").is_dir()
    refused(cli(*arguments[:-2], "5", "-q"), "has no version 'w5'")  # a mistake, which costs nothing
    got(hub)
    ok(cli(*arguments))
    assert got(hub) == {"experts/w2/layer-001.safetensors"}
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_one_that_was_stopped_as_it_exported_may_go_on_as_another(hub, of_zeros, tmp_path, monkeypatch):
    """Nothing of what the first one asked for is in the second one's export."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("moepack.hub.exported.export", stop)
        pull_for("someone/symmetric", tmp_path / "out", "vllm", Wanted("4", dense="w8"))
    pull_for("someone/symmetric", tmp_path / "out", "transformers", Wanted("2"))
    export(of_zeros("symmetric"), tmp_path / "plain", "checkpoint", Wanted("2"))
    assert same(tmp_path / "out", tmp_path / "plain")


def test_what_eval_measured_is_on_the_page(hub, of_zeros, evaluation, tmp_path):
    bundle, measured = of_zeros("fractional"), tmp_path / "w2.json"
    options = ["--policy", "static:w2", "--kl", "-d", evaluation, "--length", "32", "--samples", "2", "--json", "-q"]
    measured.write_text(ok(cli("eval", bundle, *options)))
    ok(cli("push", bundle, "someone/card", "--measured", measured, "-q"))
    card = hub.files["someone/card"]["README.md"].decode()
    kl = json.loads(measured.read_text())["kl"]
    assert kl > 0 and any(line.startswith("| w2 |") and f"| {1e3 * kl:.1f} (" in line for line in card.splitlines())
