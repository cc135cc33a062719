"""What layers pass on beside hidden states: recorded from the model's own code, replayed, kept and taken up again."""

import pytest
import torch
from passes import begun, through
from support import ids as token_ids

from benchmarks import families
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.dense import dense_matrices, watch_part
from moepack.calibrate.stream import StreamedModel
from moepack.calibrate.trace import Recording, ReturnsMore, Unsupported
from moepack.pack.errors import InputError

# An indexer's choice and shared keys and values; outputs of earlier layers, computed with between layers.
PASSING = ("mistral_large4", "inkling2_text")


def a_pass(checkpoint):
    return begun(StreamedModel(open_checkpoint(checkpoint)), token_ids(24, 2, 3), 2)  # 2 + 1: two batch sizes


def head(walk):
    stream = walk._stream
    watch = watch_part(stream, [m for m in dense_matrices(stream) if m.layer is None], walk.windows, walk.length)
    walk.run_head(watch)
    (learn,) = watch.moments().learn
    return learn


@pytest.mark.parametrize("name", PASSING)
def test_a_pass_taken_up_again(name, demo_model, tmp_path):
    """Interrupted before any layer, the rest gives the same bits, up to what the output projection reads."""
    plain = families.save(families.small(name), tmp_path / "checkpoint", demo_model).float().eval()
    whole = a_pass(tmp_path / "checkpoint")
    kept = [{n: x.clone() for n, x in whole.kept().items()}]
    for i in range(4):
        through(whole, whole._stream, [i])
        kept.append({n: x.clone() for n, x in whole.kept().items()})
    want, read = whole.kept(), head(whole)
    assert max(map(len, kept)) > 2  # more than two batches' hidden states
    with torch.inference_mode():
        got = []
        hook = plain.get_output_embeddings().register_forward_pre_hook(lambda m, args: got.append(args[0].clone()))
        for ids in whole._batches:
            plain(input_ids=ids, use_cache=False)
        hook.remove()
    x = torch.cat([g.reshape(-1, g.shape[-1]) for g in got])
    assert float((x.T @ x / len(x) - read).norm() / read.norm()) <= 1e-4
    for i in (1, 2, 3, 4):
        again = a_pass(tmp_path / "checkpoint")
        again.restore(sorted(kept[i].items()))
        through(again, again._stream, range(i, 4))
        now = again.kept()
        assert now.keys() == want.keys() and all(torch.equal(now[n], x) for n, x in want.items())
        assert torch.equal(head(again), read)


def test_layers_that_run_twice_are_refused(demo_model, tmp_path):
    families.save(families.small("inkling2_loop_text"), tmp_path / "checkpoint", demo_model)
    with pytest.raises(InputError, match="inkling2_loop_text run more than once"):
        a_pass(tmp_path / "checkpoint")


def test_what_is_not_replayed():
    x, one = torch.ones(1, 2, 3), Recording(1)
    out = one.layer(0, x, (), {})
    with pytest.raises(ReturnsMore):
        _, _ = out
    with pytest.raises(ReturnsMore):
        out[0]
    assert out.shape == (1, 2, 3) and len(one.steps) == 1
    with pytest.raises(Unsupported, match="changed in place"):
        out += 1
    with pytest.raises(Unsupported, match="changed in place"):
        out[:, 0] = 0
    with pytest.raises(Unsupported, match="do not read the layer before"):
        one.layer(1, x, (), {})
    with pytest.raises(Unsupported, match="more than once"):
        Recording(1).layer(1, x, (), {})
