"""Precomputed reference log-probabilities are reused, but only if everything they depend on is unchanged."""

from __future__ import annotations

import logging

import datasets
import numpy as np
import pytest
from datasets import Dataset, load_from_disk

import trl_jax
from compat_tests.effort import thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows
from trl_jax.tasks.language import REFERENCE_COLUMNS
from trl_jax.training import reference_logps

ROWS = 140  # three windows with a batch size of one pair


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The (empty) cache folder of all datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "datasets"


@pytest.fixture
def computed(monkeypatch):
    """The indices of rows as they are computed; each batch is stored as a separate part."""
    rows, put = [], reference_logps.LogpsCache.put

    def counting(self, start, values):
        rows.extend(range(start, start + values.shape[1]))
        put(self, start, values)

    monkeypatch.setattr(reference_logps.LogpsCache, "put", counting)
    monkeypatch.setattr(reference_logps, "SECONDS", 0)
    return rows


@pytest.fixture
def model(checkpoint):
    return str(checkpoint(**SMALL))


def table(n=ROWS, seed=0):
    return Dataset.from_list(preference_rows(n, "prompt", seed=seed))


def make(model, out, rows=None, trainer="DPO", config=None, **arguments):
    options = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1, "max_length": 64}
    args = getattr(trl_jax, f"{trainer}Config")(str(out), **(BASE | options | (config or {})))
    rows = table() if rows is None else rows
    return getattr(trl_jax, f"{trainer}Trainer")(model, args=args, train_dataset=rows, **arguments)


def numbers(trainer):
    return np.asarray([trainer.train_dataset[name] for name in trainer._setup.task.columns.optional], np.float32)


def parts(cache):
    return sorted(cache.glob("reference-logps-*/*"))


def test_a_second_run_computes_nothing(model, cache, computed, tmp_path, monkeypatch):
    first = make(model, tmp_path, eval_dataset=table(4, seed=9))
    assert computed == [*range(ROWS), *range(4)]
    monkeypatch.setattr(reference_logps, "_compiled", None)
    second = make(model, tmp_path / "other", eval_dataset=table(4, seed=9), config={"beta": 0.7})
    assert len(computed) == ROWS + 4 and numbers(second).dtype == np.float32
    np.testing.assert_array_equal(numbers(second), numbers(first))
    for name in REFERENCE_COLUMNS:
        assert second.eval_dataset[name] == first.eval_dataset[name]
    assert (numbers(first) < -1).all()


def test_kto_has_it_too(model, cache, computed, tmp_path):
    rows = trl_jax.unpair_preference_dataset(table(6)).shuffle(seed=1)
    first, second = (make(model, tmp_path, rows, "KTO") for _ in range(2))
    assert computed == [*range(12)] and numbers(first).shape == (2, 12)
    np.testing.assert_array_equal(numbers(second), numbers(first))


def test_the_parts_lie_beside_the_cache_files_of_the_rows(model, cache, computed, tmp_path):
    table(5).save_to_disk(tmp_path / "saved")
    for _ in range(2):
        make(model, tmp_path / "out", load_from_disk(str(tmp_path / "saved")))
    assert computed == [*range(5)] and not cache.exists()
    assert len(parts(tmp_path / "saved")) == 5


CHANGES = {
    "adapter": ({}, {"peft_config": trl_jax.LoraConfig(target_modules=["q_proj"])}),
    "rows": ({"max_length": 20}, {}),
    "weighting": ({"ld_alpha": 0.5}, {}),
    "dtype": ({"bf16": True}, {}),
    "batch": ({"precompute_ref_batch_size": 2}, {}),  # the scaling of some RoPE types depends on it
}


def test_what_changes_the_numbers_computes_them_anew(model, checkpoint, cache, computed, tmp_path):
    rows, other = table(4), str(checkpoint(**SMALL, seed=5))
    make(model, tmp_path, rows)
    for name, (config, arguments) in CHANGES.items():
        before = len(computed)
        make(model, tmp_path, rows, config=config, **arguments)
        # With a new adapter, the reference is the model without it.
        assert len(computed) - before == (0 if name == "adapter" else 4), name
    ours, theirs = (numbers(make(model, tmp_path, rows, ref_model=ref)) for ref in (model, other))
    assert np.abs(ours - theirs).max() > 0.1
    before = len(computed)
    np.testing.assert_array_equal(numbers(make(other, tmp_path, rows)), theirs)
    assert len(computed) == before


def test_an_activation_of_the_config_is_part_of_the_model(model, checkpoint, cache, computed, tmp_path):
    """The models have the same weights."""
    for act in ("silu", "gelu", "gelu_new"):
        make(str(checkpoint(**SMALL, hidden_act=act)), tmp_path, table(4))
    assert len(computed) == 12


def test_a_run_that_ended_early_is_gone_on_with(model, cache, computed, tmp_path, monkeypatch):
    whole = numbers(make(model, tmp_path, config={"precompute_ref_batch_size": 1}))
    for path in parts(cache):
        path.unlink()
    compiled, calls = reference_logps._compiled, []

    def ends(run):
        compute = compiled(run)

        def computing(batch):
            calls.append(batch)
            if len(calls) == 60:
                raise KeyboardInterrupt
            return compute(batch)

        return computing

    computed.clear()
    with monkeypatch.context() as patch:
        patch.setattr(reference_logps, "_compiled", ends)
        with pytest.raises(KeyboardInterrupt):
            make(model, tmp_path)
    done = len(computed)
    assert 0 < done < ROWS and len(parts(cache)) == done
    again = make(model, tmp_path)
    assert computed == [*range(ROWS)]
    np.testing.assert_array_equal(numbers(again), whole)

    lost = parts(cache)[5:8]  # as if killed while other parts were being written
    for path in lost:
        path.unlink()
    computed.clear()
    np.testing.assert_array_equal(numbers(make(model, tmp_path)), whole)
    assert sorted(computed) == sorted(int(path.name.partition("-")[0]) for path in lost)


@pytest.mark.parametrize("layout", [thorough("padded"), "shared"])
def test_what_is_gone_on_with_is_what_was_never_broken_off(layout, model, cache, computed, tmp_path):
    """Bitwise, whichever parts were cached, although the remaining rows are batched in other shapes. Another batch size
    changes only the rounding."""
    config = {"batch_layout": layout, "precompute_ref_batch_size": 2}
    whole = numbers(make(model, tmp_path, config=config))
    other = numbers(make(model, tmp_path, config=config | {"precompute_ref_batch_size": 5}))
    np.testing.assert_allclose(other, whole, rtol=0, atol=1e-4)
    found = [path for path in parts(cache) if path.parent == parts(cache)[0].parent]
    for path in found[::3]:
        path.unlink()
    for size in (2, 5):
        again = numbers(make(model, tmp_path, config=config | {"precompute_ref_batch_size": size}))
        np.testing.assert_array_equal(again, whole if size == 2 else other)


def damage(path, how):
    content = path.read_bytes()
    path.write_bytes(content[:-2] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))


def test_damaged_parts_are_computed_again_and_one_line_says_so(model, cache, computed, tmp_path, caplog):
    whole = numbers(make(model, tmp_path, table(6)))
    damage(parts(cache)[1], "cut")
    damage(parts(cache)[4], "flip")
    (parts(cache)[0].parent / "7-of somebody.npy").write_bytes(b"")
    (parts(cache)[0].parent / "0-digest.npy.part").write_bytes(b"half")
    computed.clear()
    with caplog.at_level(logging.WARNING, "trl_jax"):
        again = make(model, tmp_path, table(6))
    assert computed == [1, 4]
    np.testing.assert_array_equal(numbers(again), whole)
    told = [record.message for record in caplog.records if "damaged" in record.message]
    assert len(told) == 1 and told[0].startswith("3 of the files of log-probabilities in")
    caplog.clear()
    make(model, tmp_path, table(6))
    assert computed == [1, 4] and not [record for record in caplog.records if "damaged" in record.message]


def test_no_pickle_is_read(tmp_path):
    import io

    import xxhash

    buffer = io.BytesIO()
    np.save(buffer, np.array([[{}, {}]], object), allow_pickle=True)
    (tmp_path / f"0-{xxhash.xxh3_128_hexdigest(buffer.getvalue())}.npy").write_bytes(buffer.getvalue())
    found = reference_logps.LogpsCache(tmp_path, 1, 2)
    assert not found.known.any()


def test_a_disk_that_takes_nothing_costs_a_warning(model, cache, computed, tmp_path, caplog):
    cache.write_text("no folder")
    with caplog.at_level(logging.WARNING, "trl_jax"):
        assert (numbers(make(model, tmp_path, table(4))) < -1).all()
    assert [record.message for record in caplog.records if "are not kept for the next run" in record.message]


def test_nothing_is_kept_where_caching_is_off(model, cache, computed, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "is_caching_enabled", lambda: False)
    for _ in range(2):
        make(model, tmp_path, table(3))
    assert computed == [0, 1, 2] * 2 and not cache.exists()
