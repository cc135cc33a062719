"""The card and what travels beside the weights: licence, templates, tokenizers, processors, a model's own code."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support import build_from, tree

import moepack
from moepack.calibrate.checkpoint import companions
from moepack.hub.measured import read_divergences
from moepack.pack.errors import InputError
from moepack.pipeline.model_card import MeasuredKl, carried, hub_commit, hub_id, model_card
from moepack.reports.verify import verify

RECIPE = "quantize: {method: rtn, loss_tokens: 64}\ncalibration: {samples: 2, length: 64}\nversions: [bf16, w2]\n"
TRAVELS = {
    "LICENSE": "the licence", "NOTICE.txt": "notice", "USE_POLICY.md": "policy", "chat_template.jinja": "{{ x }}",
    "additional_chat_templates/tools.jinja": "{{ y }}", "preprocessor_config.json": "{}", "processor_config.json": "{}",
    "video_preprocessor_config.json": "{}", "qwen.tiktoken": "IQ== 0\n", "vocab.txt": "a\n", "spiece.model": "x",
}  # fmt: skip
STAYS = {"optimizer.pt": "x", "trainer_state.json": "{}", ".env": "secret", "notes.txt": "x", "original/a.json": "{}"}
CARD = """---
license: other
license_name: model-licence
license_link: LICENSE
language: [en, de]
widget: [{text: hi}]
---
# A model
"""


def facts(card):
    return dict(yaml.safe_load(card.split("---\n")[1]))


@pytest.fixture
def checkpoint(short_model, tmp_path):
    """As the Hub's cache has it."""
    path = tmp_path / "hub" / "models--some--mini-moe" / "snapshots" / ("0" * 40)
    shutil.copytree(short_model, path)
    for name, text in {**TRAVELS, **STAYS, "README.md": CARD, "tokenization_mini.py": "x = 1\n"}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def test_companions_travel_and_the_card_carries_the_licence(checkpoint, text, tmp_path):
    assert "tokenization_mini.py" not in companions(checkpoint)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_mini.Mini", None]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    build_from(RECIPE, checkpoint, tmp_path / "b", [text])
    made = tree(tmp_path / "b")
    assert {n: made[n].decode() for n in TRAVELS} == TRAVELS and "tokenization_mini.py" in made
    assert not set(STAYS) & set(made)
    assert verify(tmp_path / "b", checkpoint) == []
    manifest = moepack.open(tmp_path / "b").manifest
    assert set(TRAVELS) < set(manifest.files) and "README.md" not in manifest.files, "a card is edited on its page"
    found = facts(made["README.md"].decode())
    assert found == {
        "library_name": "moepack", "pipeline_tag": "text-generation", "license": "other",
        "license_name": "model-licence", "license_link": "LICENSE", "language": ["en", "de"],
        "base_model": "some/mini-moe", "base_model_relation": "quantized",
        "tags": ["moepack", "mixture-of-experts", "quantized", "qwen3_moe"],
    }  # fmt: skip
    for words in ("| bf16 | lossless |", "| w2 | 2 bits, groups of", "128 calibration tokens", "[LICENSE](LICENSE)"):
        assert words in made["README.md"].decode(), words


def test_the_card_has_the_bundles_numbers_and_which_command_for_which_memory(bundle):
    """From the least memory up: what lies outside the experts, and the experts as they are in memory."""
    opened = moepack.open(bundle)
    text = model_card(opened.manifest, opened.calibration(), ["bf16", "w4"], "me/mini", "losses.png")
    on_disk = sum(p.stat().st_size for p in (bundle / "experts" / "w4").iterdir()) / 1e6
    assert f"| w4 | 4 bits, groups of 64 | {on_disk:,.1f} MB | 4.38 |" in text and "| w2 |" not in text
    assert 'moepack.load("me/mini", policy="static:w4")' in text and "](losses.png)" in text
    assert "base_model" not in facts(text) and facts(text)["license"] == "apache-2.0", "as its checkpoint's card says"
    outside = sum(size for name, size in opened.files.items() if name.startswith("model") and "safetensors" in name)
    plain = outside + 2 * opened.expert_weights  # BF16, as its codes are decoded in memory
    files = [(opened.layer_file("w4", i), layer.experts) for i, layer in enumerate(opened.layers)]
    coded = outside + sum(file.extent_size(e) for file, experts in files for e in range(experts))
    sizes = {"w4": coded, "bf16": plain}
    rows = (f"| {size / 1e6:,.1f} MB | `moepack serve me/mini --policy static:{v}` |" for v, size in sizes.items())
    assert "\n".join(rows) in text and "WHERE" not in text and "LAST" not in text
    assert "moepack pull me/mini -o here --for transformers --bits w4" in text


def test_the_card_has_divergences_where_they_were_measured(bundle, tmp_path):
    opened = moepack.open(bundle)
    told = {"policy": "static:w4", "kl": 0.0024, "kl_interval": [0.0022, 0.00251], "perplexity": 37.0}
    (tmp_path / "w4.json").write_text(json.dumps(told))
    found = read_divergences([tmp_path / "w4.json"], ["w4", "w1"])
    assert found == {"w4": MeasuredKl(0.0024, 0.0022, 0.00251)}
    with pytest.raises(InputError, match="measures w4, as another file does"):
        read_divergences([tmp_path / "w4.json"] * 2, ["w4", "w1"])
    text = model_card(opened.manifest, opened.calibration(), ["w4", "w1"], divergences=found)
    table = [line for line in text.splitlines() if line.startswith(("| version", "|---|---|---", "| w4", "| w1"))]
    assert table[2].endswith(" | 2.4 (2.2 to 2.5) |") and {line.count("|") for line in table} == {7}
    assert "KL" not in model_card(opened.manifest, opened.calibration(), ["w4"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"), ("[1]", "is not what moepack eval --kl"),
        ('{"policy": "static:w4", "kl": 0.1, "kl_interval": null}', "is not what moepack eval --kl"),
        ('{"policy": "static:w3", "kl": 0.1, "kl_interval": [0.1, 0.2]}', "measures w3, and the bundle has w4, w1"),
        ('{"policy": null, "kl": 0.1, "kl_interval": [0.1, 0.2]}', "is not what moepack eval --kl"),
        ('{"policy": "static:w4", "kl": 0.1, "kl_interval": [-Infinity, Infinity]}', "of two samples or more"),
        ('{"policy": "static:w4", "kl": 1e307, "kl_interval": [0.1, 1e308]}', "is not what moepack eval --kl"),
        ('{"policy": "static:w4", "kl": 0.3, "kl_interval": [0.1, 0.2]}', "is not what moepack eval --kl"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_divergences_that_are_none(text, words, tmp_path):
    if text is not None:
        (tmp_path / "f.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_divergences([tmp_path / "f.json"], ["w4", "w1"])


def test_hostile_words_stay_words(damaged, edit_manifest):
    evil = "x\n---\n# owned ![](http://x) <script> | [a](b)"

    def change(m):
        m["provenance"] = {
            "checkpoint": {"name": evil, "id": evil, "card": {"license": evil, "language": [3], "tags": ["x"]}},
            "calibration": {"sources": [evil], "samples": [], "length": evil},
        }

    edit_manifest(damaged, change)
    opened = moepack.open(damaged)
    text = model_card(opened.manifest, opened.calibration(), ["w2"])
    head, body = text[4:].split("\n---\n", 1)
    found = yaml.safe_load(head)
    assert found["base_model"] == found["license"] == evil and "language" not in found
    assert "<script>" not in body.replace("\\<script\\>", "") and "\n# owned" not in body and "![](" not in body


def test_a_checkpoints_card(tmp_path):
    card = tmp_path / "README.md"
    assert carried(card) == {}
    for text in ("", "no head", "---\n[broken\n---\n", "---\n- list\n---\n", "---\n" + "[" * 2000 + "\n---\n"):
        card.write_text(text)
        assert carried(card) == {}
    card.write_text("---\r\nlicense: apache-2.0\r\nlanguage: 3\r\n---\r\n")
    assert carried(card) == {"license": "apache-2.0"}
    folder = Path(f"/c/models--Qwen--Qwen3-30B-A3B/snapshots/{40 * 'a'}")
    assert (hub_id(folder), hub_commit(folder)) == ("Qwen/Qwen3-30B-A3B", 40 * "a")
    assert hub_id(tmp_path) is hub_commit(Path("/models/snapshots/mini")) is None
