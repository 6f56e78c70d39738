"""Random completions for the tests of policy losses (two micro-batches of four, some without tokens that count), and
their losses by TRL and by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

MICRO_BATCHES, ROWS, T = 2, 4, 6
X = MICRO_BATCHES * ROWS
LENGTHS = np.asarray([3, 6, 1, 0, 5, 2, 4, 6])  # the fourth was truncated and is masked out
MASK = np.arange(T) < LENGTHS[:, None]
SPG, GENERATED = 4, 61  # micro-batches of a generation, and its tokens; 27 are in this step


class Data(NamedTuple):
    """`[X, T]` each, except for advantages `[X]`; float64."""

    logps: np.ndarray
    old_logps: np.ndarray
    ref_logps: np.ndarray
    sampling_logps: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray


def data(seed: int = 0, on_policy: bool = False) -> Data:
    random = np.random.default_rng(seed)
    logps = -random.gamma(2.0, 0.7, (X, T))
    old, ref, sampling = (logps + random.normal(0, spread, (X, T)) for spread in (0.35, 0.3, 0.2))
    advantages = random.normal(0, 1, X)
    advantages[5] = 0.0
    entropies = random.gamma(2.0, 0.5, (X, T))
    made = Data(logps, logps if on_policy else old, ref, sampling, entropies, advantages)
    return Data(*(values.astype(np.float32).astype(np.float64) for values in made))


class Result(NamedTuple):
    """Loss, gradients of log-probabilities and entropies `[X, T]`, and metrics of each micro-batch."""

    loss: float
    by_logps: np.ndarray
    by_entropies: np.ndarray
    metrics: dict[str, list[float]]


def of_trl(given: Data, *, old: bool = True, sampling: bool = False, coef: float = 0.0, train: bool = True,
           **settings: Any) -> Result:  # fmt: skip
    """TRL's `_compute_loss`, one micro-batch after another, with a model that returns these log-probabilities."""
    import torch
    from trl import GRPOTrainer

    def tensor(values, requires_grad=False):
        return torch.tensor(values, dtype=torch.float32, requires_grad=requires_grad)

    logps, entropies = tensor(given.logps, True), tensor(given.entropies, True)
    stub = _stub(GRPOTrainer, settings, coef, train)
    total = 0.0
    for micro in range(MICRO_BATCHES):
        rows = slice(micro * ROWS, (micro + 1) * ROWS)
        mask = torch.tensor(MASK[rows].astype(np.int64))
        inputs = {"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask,
                  "completion_mask": mask, "advantages": tensor(given.advantages[rows]),
                  "num_items_in_batch": torch.tensor(GENERATED if train else int(MASK[rows].sum()))}  # fmt: skip
        if old:
            inputs["old_per_token_logps"] = tensor(given.old_logps[rows])
        if settings.get("beta"):
            inputs["ref_per_token_logps"] = tensor(given.ref_logps[rows])
        if sampling:
            inputs["sampling_per_token_logps"] = tensor(given.sampling_logps[rows])
        if stub.use_vllm:
            inputs["importance_sampling_ratio"] = tensor(_correction(given, rows, settings))
        stub._get_per_token_logps_and_entropies = lambda *a, rows=rows, **k: (logps[rows], entropies[rows], None)
        total = total + GRPOTrainer._compute_loss(stub, None, inputs)
    total.backward()
    gradients = (np.zeros((X, T)) if leaf.grad is None else leaf.grad.numpy() for leaf in (logps, entropies))
    return Result(total.item(), *gradients, dict(stub._metrics["train" if train else "eval"]))


def _stub(trainer: type, settings: dict[str, Any], coef: float, train: bool) -> SimpleNamespace:
    known = {"beta": 0.0, "loss_type": "dapo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0,
             "off_policy_mask_threshold": None, "max_completion_length": 512}  # fmt: skip
    args = {"delta": None, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
            "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x)  # fmt: skip
    stub = SimpleNamespace(
        **{name: settings.get(name, value) for name, value in known.items()},
        args=SimpleNamespace(**{name: settings.get(name, value) for name, value in args.items()},
                             steps_per_generation=SPG),
        accelerator=accelerator, model=SimpleNamespace(training=train), aux_loss_enabled=False,
        epsilon_low=settings.get("epsilon", 0.2), current_gradient_accumulation_steps=MICRO_BATCHES,
        use_vllm=settings.get("sampler_correction") is not None, vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=coef != 0, use_adaptive_entropy=False, entropy_coef=coef,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        get_off_policy_mask=trainer.get_off_policy_mask, get_gamma_weights=trainer.get_gamma_weights)  # fmt: skip
    stub.epsilon_high = settings.get("epsilon_high") or stub.epsilon_low
    stub.get_high_entropy_mask = lambda *a: trainer.get_high_entropy_mask(stub, *a)
    return stub


def _correction(given: Data, rows: slice, settings: dict[str, Any]) -> np.ndarray:
    difference = np.nan_to_num((given.old_logps[rows] - given.sampling_logps[rows]) * MASK[rows], nan=0.0)
    mode, least, most = (settings[f"sampler_{name}"] for name in ("correction", "clip_min", "clip_max"))
    ratio = np.exp(difference.sum(1, keepdims=True) if mode.startswith("sequence") else difference)
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    return (
        np.clip(ratio, least, most)
        if mode.endswith("truncate")
        else np.where((ratio < least) | (ratio > most), 0.0, ratio)
    )


def by_hand(given: Data, logps: np.ndarray, entropies: np.ndarray, *, loss_type="dapo",
            importance_sampling_level="token", beta=0.0, delta=None, epsilon=0.2, epsilon_high=None,
            use_bias_correction_kl=True, coef=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            max_completion_length=512, old=True) -> float:  # fmt: skip
    """The loss in float64, one completion at a time. Only `logps` may be perturbed; stopped gradients use those of
    `given`, so that finite differences of this function equal the gradient."""
    high = epsilon if epsilon_high is None else epsilon_high
    total = 0.0
    for micro in range(MICRO_BATCHES):
        rows = range(micro * ROWS, (micro + 1) * ROWS)
        tokens = [(i, t) for i in rows for t in range(LENGTHS[i])]
        cut = np.quantile([given.entropies[at] for at in tokens], 1 - top_entropy_quantile)
        uncertain = [at for at in tokens if top_entropy_quantile == 1 or given.entropies[at] >= cut]
        of_rows = []
        for i in rows:
            n, advantage, stopped = LENGTHS[i], given.advantages[i], given.logps[i]
            before = given.old_logps[i] if old else stopped
            rho, still = (np.exp(values[:n] - before[:n]) for values in (logps[i], stopped))
            if importance_sampling_level == "sequence" and n:
                rho, still = (np.full(n, np.exp(np.log(values).mean())) for values in (rho, still))
            k = given.ref_logps[i, :n] - logps[i, :n]
            kl = (np.exp(k) - k - 1) * (rho if use_bias_correction_kl else 1)
            w = np.exp(np.clip((stopped - before)[:n].sum(), math.log(1e-8), 20))
            lam, power = (3.0, 2.0) if advantage >= 0 else (2.0, 3.0)
            tau = 1.0 if advantage > 0 else 1.05
            capped = rho if delta is None else np.minimum(rho, delta)
            x = {
                "cispo": -np.minimum(still, high) * advantage * logps[i, :n],
                "sapo": -4 / tau / (1 + np.exp(-tau * (rho - 1))) * advantage,
                "vespo": -np.exp(lam) * w**power * np.exp(-lam * w) * advantage * logps[i, :n],
            }.get(loss_type, -np.minimum(capped * advantage, np.clip(rho, 1 - epsilon, 1 + high) * advantage))
            if off_policy_mask_threshold is not None and advantage < 0 and n:
                x = x * ((before - stopped)[:n].mean() <= off_policy_mask_threshold)
            of_rows.append(x * [(i, t) in uncertain for t in range(n)] + beta * kl)
        total += {
            "grpo": np.mean([x.sum() / max(len(x), 1) for x in of_rows]) / MICRO_BATCHES,
            "bnpo": np.concatenate(of_rows).sum() / max(len(tokens), 1) / MICRO_BATCHES,
            "dr_grpo": np.concatenate(of_rows).sum() / (ROWS * max_completion_length) / MICRO_BATCHES,
            "luspo": np.mean([x.sum() for x in of_rows]) / MICRO_BATCHES,
            "dapo": np.concatenate(of_rows).sum() / (GENERATED * MICRO_BATCHES / SPG),
        }[{"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(loss_type, loss_type)]
        total -= coef * np.mean([entropies[at] for at in uncertain]) / MICRO_BATCHES if coef else 0.0
    return float(total)


def rloo_stub(epsilon_high: float | None) -> SimpleNamespace:
    """The attributes of an RLOOTrainer that its `_compute_loss` reads."""
    import torch

    accelerator = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        accelerator=accelerator, model=torch.nn.Identity().train(), aux_loss_enabled=False, epsilon_low=0.2,
        epsilon_high=0.2 if epsilon_high is None else epsilon_high,
        _metrics={"train": defaultdict(list)})  # fmt: skip
