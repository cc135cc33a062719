"""Numbers of a config.json that no model has, and those that only say how large it is."""

import pytest

from moepack.pack.config_counts import check_counts
from moepack.pack.errors import InputError


@pytest.mark.parametrize(
    "document",
    [{"num_parameters": 30 * 10**9}, {"n_params": 10**12}, {"total_size": 61 * 10**9}, {"num_train_tokens": 10**13},
     {"vocab_size": 262_144, "hidden_size": 7168, "num_hidden_layers": 61, "num_experts": 384}, {"hidden_size": "x"},
     {"sliding_window": None, "use_sliding_window": False}, {"sliding_window": None, "use_sliding_window": True},
     {"layer_types": ["full_attention"], "sliding_window": None}, {"layer_types": ["sliding_attention"]},
     {"layer_types": 7, "sliding_window": 0}],
)  # fmt: skip
def test_what_models_say_is_taken(document):
    check_counts("config.json", document)


@pytest.mark.parametrize(
    "key",
    ["num_labels", "num_hidden_layers", "n_layer", "hidden_size", "head_dim", "d_model", "num_experts", "vocab_size"],
)  # fmt: skip
def test_what_no_model_has_is_refused(key):
    for document in ({key: 10**10}, {"text_config": {key: 10**10}}, {key: [1, 10**10]}):
        with pytest.raises(InputError, match=f"c has {key} 10000000000: "):
            check_counts("c", document)


@pytest.mark.parametrize("window", [None, 0, -1, True, "128", 1.5])
def test_attention_that_slides_over_nothing_is_refused(window):
    own = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window}
    for document in (own, {"text_config": own}):
        with pytest.raises(InputError, match=f"c has sliding_window {window}, and layers whose attention slides"):
            check_counts("c", document)
