"""Policy losses: by hand in float64 with finite differences, and against TRL; mutants must be noticed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.losses import policies
from compat_tests.losses.policies import GENERATED, LENGTHS, MASK, MICRO_BATCHES, ROWS, SPG, Result, T, X
from trl_jax.core.trainers import GRPO_LOSSES
from trl_jax.losses import policy_gradient
from trl_jax.losses.policy_gradient import PolicyLoss, grpo_loss, rloo_loss, token_weights
from trl_jax.tasks.policy import grpo_metrics, rloo_metrics

MICRO_BATCH = np.repeat(np.eye(MICRO_BATCHES, dtype=bool), ROWS, axis=1)
FLAT = np.flatnonzero(MASK)  # indices of tokens that count, in both micro-batches
ORDER = np.random.default_rng(1).permutation(FLAT)
FILLED = 5  # padding, with arbitrary values
TEXT = np.append(ORDER // T, np.full(FILLED, X)).astype(np.int32)


def reads(values, filler):
    return None if values is None else np.append(values.reshape(-1)[ORDER], np.full(FILLED, filler)).astype(np.float32)


def gradients_of():
    def total(logps, entropies, extras, weight, share, coef, advantages, settings):
        return grpo_loss(logps, advantages, **extras, entropies=entropies, text=TEXT,
                         token_weight=weight, completion_weight=share,
                         micro_batch=MICRO_BATCH, entropy_coef=coef, settings=settings)  # fmt: skip

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), static_argnames="settings")


GRADIENTS = gradients_of()  # compiled once per setting


def ours(given, *, old=True, sampling=False, coef=None, train=True, weigh=token_weights, gradients=GRADIENTS,
         **settings) -> Result:  # fmt: skip
    """The loss of one pass with the tokens of both micro-batches in any order; gradients as `[X, T]`."""
    settings = PolicyLoss(**settings)
    share = np.full(X, 1 / X if train else 1 / ROWS, np.float32)
    weight = weigh(settings, LENGTHS, share, MICRO_BATCH, generated_tokens=GENERATED, part=MICRO_BATCHES / SPG)
    if not train:  # each batch is weighted separately
        each = [token_weights(settings, LENGTHS * row, share * row, row[None]) for row in MICRO_BATCH]
        weight = np.sum(each, axis=0)
    extras = {"old_logps": given.old_logps if old else None, "ref_logps": given.ref_logps if settings.beta else None,
              "sampling_logps": given.sampling_logps if sampling else None}  # fmt: skip
    extras = {name: reads(values, np.nan) for name, values in extras.items()}
    logps, entropies = reads(given.logps, 1e30), reads(given.entropies, 1e30)
    advantages = given.advantages.astype(np.float32)
    (value, sums), slopes = gradients(logps, entropies, extras, weight, share, coef, advantages, settings=settings)
    metrics = grpo_metrics(settings, [{name: np.asarray(part)[None] for name, part in sums.items()}])
    return Result(float(value), *map(placed, slopes), {name: part.tolist() for name, part in metrics.items()})


def placed(slopes):
    assert not np.asarray(slopes)[len(ORDER) :].any()
    made = np.zeros(X * T)
    made[ORDER] = slopes[: len(ORDER)]
    return made.reshape(X, T)


def distance(one: Result, other: Result) -> float:
    """The largest difference of losses, gradients and metrics, which must have the same names in the same order."""
    assert list(one.metrics) == [name for name in other.metrics if name != "entropy_coef"]
    pairs = [(one.loss, other.loss), (one.by_logps, other.by_logps), (one.by_entropies, other.by_entropies)]
    pairs += [(values, other.metrics[name]) for name, values in one.metrics.items()]
    return max(float(np.max(np.abs(np.subtract(*pair)))) for pair in pairs)


NEAR = 2e-6
LEVELS = ("token", "sequence")
FURTHER = {
    "defaults": {},
    "first pass": {"old": False, "beta": 0.04},
    "first pass of cispo": {"old": False, "beta": 0.04, "loss_type": "cispo"},
    "delta": {"delta": 1.1, "loss_type": "grpo", "beta": 0.1},
    "delta of sequences": {"delta": 1.05, "importance_sampling_level": "sequence", "beta": 0.1},
    "bounds": {"epsilon": 0.1, "epsilon_high": 0.28},
    "bound of cispo": {"epsilon_high": 1.3, "loss_type": "cispo"},
    "plain divergence": {"beta": 0.3, "use_bias_correction_kl": False},
    "constant": {"loss_type": "dr_grpo", "max_completion_length": 7},
    "off policy": {"off_policy_mask_threshold": 0.05, "beta": 0.1},
    "uncertain tokens": {"top_entropy_quantile": 0.5, "beta": 0.1},
    "few uncertain tokens": {"top_entropy_quantile": 0.2, "loss_type": "bnpo"},
    "the most uncertain token": {"top_entropy_quantile": 0.0, "loss_type": "grpo"},
    "bonus": {"coef": 0.03, "loss_type": "grpo", "beta": 0.1},
    "bonus of uncertain tokens": {"coef": 0.03, "top_entropy_quantile": 0.4},
}
GRID = {f"{name}, {level}, beta {beta}": {"loss_type": name, "importance_sampling_level": level, "beta": beta}
        for name in GRPO_LOSSES for level in LEVELS for beta in (0.0, 0.2)}  # fmt: skip


# By default, one of those compared with TRL below, and all that are not.
@usual(
    "grpo, token, beta 0.2", "defaults", "first pass of cispo", "delta of sequences", "bounds", "bound of cispo",
    "plain divergence", "few uncertain tokens", "the most uncertain token", "bonus of uncertain tokens",
)  # fmt: skip
@pytest.mark.parametrize("name", [*GRID, *FURTHER])
def test_the_loss_by_hand(name):
    settings, given = (GRID | FURTHER)[name], policies.data()
    hand, result = partial(policies.by_hand, given, **settings), ours(given, **settings)
    assert result.loss == pytest.approx(hand(given.logps, given.entropies), abs=NEAR)
    for place, slopes in ((0, result.by_logps), (1, result.by_entropies)):
        wanted = np.zeros((X, T))
        for at in np.ndindex(X, T):
            nudge = np.zeros((X, T))
            nudge[at] = 1e-6
            nudges = (nudge * (place == 0), nudge * (place == 1))
            ends = [hand(given.logps + sign * nudges[0], given.entropies + sign * nudges[1]) for sign in (1, -1)]
            wanted[at] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(slopes, wanted, atol=NEAR)


SAMPLED = {
    f"{mode}, {least}, {most}, {loss}": {"sampler_correction": mode, "sampler_clip_min": least,
                                         "sampler_clip_max": most, "loss_type": loss, "sampling": True, "beta": 0.1}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for least, most in ((0.9, 1.2), (None, 1.1), (0.8, None)) for loss in ("grpo", "vespo")
}  # fmt: skip
SAMPLED["off policy by the sampler"] = {"sampling": True, "off_policy_mask_threshold": 0.0}
EVALUATED = {f"{name} evaluated": {"loss_type": name, "train": False, "beta": 0.1} for name in GRPO_LOSSES}


@usual(
    "grpo, token, beta 0.2", "grpo, sequence, beta 0.2", "dr_grpo, token, beta 0.2", "dr_grpo, sequence, beta 0.2",
    "dapo, token, beta 0.2", "dapo, sequence, beta 0.2", "bnpo, token, beta 0.2", "bnpo, sequence, beta 0.2",
    "cispo, token, beta 0.2", "cispo, sequence, beta 0.2", "sapo, token, beta 0.2", "sapo, sequence, beta 0.2",
    "luspo, token, beta 0.2", "luspo, sequence, beta 0.2", "vespo, token, beta 0.2", "vespo, sequence, beta 0.2",
    "first pass", "delta", "constant", "off policy", "uncertain tokens", "bonus", "token_truncate, 0.9, 1.2, grpo",
    "token_mask, 0.9, 1.2, grpo", "sequence_truncate, 0.9, 1.2, grpo", "sequence_mask, 0.9, 1.2, grpo",
    "grpo evaluated", "dapo evaluated", "luspo evaluated",
)  # fmt: skip
@pytest.mark.parametrize("name", [*GRID, *FURTHER, *SAMPLED, *EVALUATED])
def test_loss_gradients_and_metrics_are_trls(name):
    pytest.importorskip("trl")
    settings = (GRID | FURTHER | SAMPLED | EVALUATED)[name]
    for seed in range(3):
        given = policies.data(seed)
        if settings.get("sampling"):  # the sampler gave no log-probability for this token
            given.sampling_logps[1, 2] = np.nan
        wanted = policies.of_trl(given, **{"coef": 0.0} | settings)
        assert distance(ours(given, **settings), wanted) < NEAR


def test_the_same_of_rows():
    """`[X, T]` without `text`: weights and shares are those of a single micro-batch that is the whole generation."""
    given = policies.data()
    names = {"old_logps": given.old_logps, "ref_logps": given.ref_logps, "entropies": given.entropies}
    settings = PolicyLoss(beta=0.1, top_entropy_quantile=0.5)
    run = jax.jit(partial(grpo_loss, settings=settings))
    loss, _ = run(jnp.float32(given.logps), jnp.float32(given.advantages), jnp.asarray(MASK), **names)
    flat = {name: reads(values, 0) for name, values in names.items()}
    wanted, _ = run(reads(given.logps, 0), jnp.float32(given.advantages), **flat, text=TEXT)
    assert loss == pytest.approx(float(wanted), abs=1e-7) and abs(loss) > 1e-3


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_a_micro_batch_may_be_divided_over_passes(loss_type):
    """Sums over both passes give the metrics; losses add up."""
    given, settings = policies.data(), PolicyLoss(loss_type=loss_type, beta=0.1)
    share = np.full(X, 1 / X, np.float32)
    weight = token_weights(settings, LENGTHS, share, MICRO_BATCH, generated_tokens=GENERATED, part=0.5)
    whole = ours(given, loss_type=loss_type, beta=0.1)
    losses, sums, compiled = [], [], jax.jit(grpo_loss, static_argnames="settings")
    for rows in ([0, 3, 5, 6], [1, 2, 4, 7]):
        inputs = (given.logps, given.advantages, MASK, given.old_logps, given.ref_logps, given.entropies)
        logps, advantages, mask, *others = (jnp.asarray(values[rows]) for values in inputs)
        others = dict(zip(("old_logps", "ref_logps", "entropies"), others, strict=True))
        loss, token_stats = compiled(logps, advantages, mask, **others,
                                 token_weight=weight[rows], completion_weight=share[rows],
                                  micro_batch=MICRO_BATCH[:, rows], settings=settings)  # fmt: skip
        losses.append(float(loss))
        sums.append({name: np.asarray(part) for name, part in token_stats.items()})
    joined = {name: np.stack([part[name] for part in sums]) for name in sums[0]}
    assert sum(losses) == pytest.approx(whole.loss, abs=1e-6)
    for name, values in grpo_metrics(settings, [joined]).items():
        np.testing.assert_allclose(values, whole.metrics[name], atol=1e-6)


@only_thorough
def test_a_micro_batch_without_a_token():
    given, nothing = policies.data(), np.zeros((X, T), bool)
    for name in GRPO_LOSSES:
        settings = PolicyLoss(loss_type=name, top_entropy_quantile=0.5)
        loss, sums = grpo_loss(jnp.float32(given.logps), jnp.float32(given.advantages), jnp.asarray(nothing),
                               entropies=jnp.float32(given.entropies), entropy_coef=0.1, settings=settings)  # fmt: skip
        metrics = grpo_metrics(settings, [{name: np.asarray(part)[None] for name, part in sums.items()}])
        assert loss == 0 and metrics["entropy"] == [0]
        assert name not in ("grpo", "dapo") or np.isnan(metrics["clip_ratio/low_min"]).all()


def test_names_that_are_unknown():
    with pytest.raises(ValueError, match="^Unknown loss type: ppo. Should be one of "):
        PolicyLoss(loss_type="ppo")
    with pytest.raises(ValueError, match="^Unknown importance sampling level: word. Possible values are 'token' and "):
        PolicyLoss(importance_sampling_level="word")


# RLOO


def rloo_of_trl(given, epsilon_high):
    import torch
    from trl import RLOOTrainer

    logps = torch.tensor(given.logps, dtype=torch.float32, requires_grad=True)
    stub = policies.rloo_stub(epsilon_high)
    total = 0.0
    for micro in range(MICRO_BATCHES):
        rows = slice(micro * ROWS, (micro + 1) * ROWS)
        mask = torch.tensor(MASK[rows].astype(np.int64))
        old = torch.tensor((given.old_logps * MASK).sum(1)[rows], dtype=torch.float32)
        inputs = {"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask,
                  "completion_mask": mask, "old_logps": old,
                  "advantages": torch.tensor(given.advantages[rows], dtype=torch.float32)}  # fmt: skip
        entropies = torch.tensor(given.entropies[rows], dtype=torch.float32)
        stub._get_per_token_logps_and_entropies = lambda *a, rows=rows, e=entropies, **k: (logps[rows], e, None)
        total = total + RLOOTrainer._compute_loss(stub, None, inputs) / MICRO_BATCHES
    total.backward()
    return Result(total.item(), logps.grad.numpy(), np.zeros((X, T)), dict(stub._metrics["train"]))


def our_rloo(given, epsilon_high):
    def total(logps):
        return rloo_loss(logps, jnp.float32((given.old_logps * MASK).sum(1)), jnp.float32(given.advantages), text=TEXT,
                         entropies=reads(given.entropies, np.nan), completion_weight=np.full(X, 1 / X, np.float32),
                         micro_batch=MICRO_BATCH, epsilon_high=epsilon_high)  # fmt: skip

    (loss, sums), slopes = jax.value_and_grad(total, has_aux=True)(reads(given.logps, 1e30))
    metrics = rloo_metrics([{name: np.asarray(part)[None] for name, part in sums.items()}])
    return Result(float(loss), placed(slopes), np.zeros((X, T)), {name: v.tolist() for name, v in metrics.items()})


@pytest.mark.parametrize("epsilon_high", [None, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rloo_is_trls(seed, epsilon_high):
    pytest.importorskip("trl")
    given = policies.data(seed)
    assert distance(our_rloo(given, epsilon_high), rloo_of_trl(given, epsilon_high)) < 5e-6


def test_rloo_by_hand():
    given = policies.data()
    rho = np.exp(((given.logps - given.old_logps) * MASK).sum(1))
    losses = -np.minimum(rho * given.advantages, np.clip(rho, 0.8, 1.2) * given.advantages)
    assert our_rloo(given, None).loss == pytest.approx(losses.mean(), abs=1e-6)


# Mutants: each of these mistakes is noticed.


def against_trl(**settings):
    given = policies.data()
    wanted = policies.of_trl(given, **{"coef": 0.0} | settings)
    return distance(ours(given, **settings, gradients=gradients_of()), wanted)


def identity(value):
    return value


MISTAKES = {
    "the clip turned round": (policy_gradient.jnp, "minimum", jnp.maximum, {"loss_type": "grpo"}),
    "a gradient through cispo's ratio": (
        policy_gradient.jax.lax, "stop_gradient", identity, {"loss_type": "cispo", "epsilon_high": 3.0}),
    "a gradient through vespo's weight": (policy_gradient.jax.lax, "stop_gradient", identity, {"loss_type": "vespo"}),
    "a divergence the other way": (policy_gradient, "kl_k3", lambda a, b: policy_gradient.kl_k3(b, a), {"beta": 0.2}),
    "a quantile of the wrong side": (
        policy_gradient, "entropy_mask", lambda h, m, q, **k: policy_gradient.entropy_mask(h, m, 1 - q, **k),
        {"top_entropy_quantile": 0.3}),
    "the lower neighbor of a quantile": (policy_gradient.jnp, "ceil", jnp.floor, {"top_entropy_quantile": 0.5}),
    "no mask of what is off policy": (
        policy_gradient, "off_policy_mask", lambda *a: jnp.ones(X), {"off_policy_mask_threshold": 0.05}),
}  # fmt: skip


@usual("the lower neighbor of a quantile", "the clip turned round")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name, monkeypatch):
    pytest.importorskip("trl")
    module, attribute, wrong, settings = MISTAKES[name]
    assert against_trl(**settings) < NEAR
    monkeypatch.setattr(module, attribute, wrong)
    assert against_trl(**settings) > 20 * NEAR


def off_by_a_token(settings, lengths, share, micro_batch, *, generated_tokens, part):
    share = share * X / (X + 1) if settings.loss_type in ("luspo", "dr_grpo") else share
    return token_weights(settings, lengths + 1, share, micro_batch, generated_tokens=generated_tokens + 1, part=part)


@pytest.mark.parametrize("loss_type", usually({"dapo", "luspo"}.__contains__, GRPO_LOSSES))
def test_a_divisor_that_is_off_by_one_is_noticed(loss_type):
    pytest.importorskip("trl")
    given = policies.data()
    wanted = policies.of_trl(given, loss_type=loss_type)
    assert distance(ours(given, loss_type=loss_type, weigh=off_by_a_token), wanted) > 3 * NEAR
