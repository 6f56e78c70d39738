"""The child process of `peers`: a trainer of TRL, trl_jax, Tunix or EasyDeL that trains one segment per request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common, dpo_turns, sft_turns, turns

_RATES = {"SFT": 2e-5, "DPO": 1e-6, "GRPO": 1e-6}  # TRL's defaults


def rows(task: str, model: Path, data: Path, count: int, max_length: int) -> list[dict[str, Any]]:
    """The first conversations (or pairs, or prompts) of the data that no arm truncates."""
    words = sft_turns.tokenizer(model)
    if task == "SFT":
        chats = (sft_turns.messages(row["chosen"]) for row in common.read_rows(data))
        fitting = ({"messages": chat} for chat in chats if chat and len(_ids(words, chat)) <= max_length)
        return list(islice(fitting, count))
    half = max_length // 2
    if task == "GRPO":
        options = {"tokenize": False, "add_generation_prompt": True}
        texts = (words.apply_chat_template(row["prompt"], **options) for row in dpo_turns.pairs(data))
        return list(islice(({"prompt": text} for text in texts if len(words(text)["input_ids"]) <= half // 2), count))
    pairs = (row for row in dpo_turns.pairs(data) if all(len(ids) <= half for ids in _of_pair(words, row)))
    return list(islice(pairs, count))


def take(
    pipe: Connection, side: str, task: str, model: Path, rows: list[dict], config: dict, segment: int, stop: int
) -> None:
    """Build TRL's or our trainer, report it, then train as `turns.train` does."""
    from datasets import Dataset

    package = turns.package_of(side)
    compiling = turns.count_compilation() if side == "trl_jax" else []
    trainer = getattr(package, f"{task}Trainer")(
        model=str(model),
        args=getattr(package, f"{task}Config")(**config),
        train_dataset=Dataset.from_list(rows),
        processing_class=sft_turns.tokenizer(model),
        **({"reward_funcs": variety} if task == "GRPO" else {}),
    )
    turns.train(pipe, trainer, side, segment, stop, {"places": None}, compiling)


def variety(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The reward: the number of distinct characters."""
    return [float(len(set(text))) for text in completions]


def take_tunix(
    pipe: Connection, task: str, model: Path, rows: list[dict], config: dict, pad: int | None, segment: int, stop: int
) -> None:
    """The same for Tunix; runs in the interpreter of Tunix's environment.

    Args:
        pad: length to which all texts are padded; None: the longest of each batch, rounded up to a multiple of 128.
    """
    import jax
    import numpy as np
    from flax import nnx

    compiling, size = turns.count_compilation(), config["per_device_train_batch_size"]
    words = sft_turns.tokenizer(model)
    if task == "GRPO":
        size //= config["num_generations"]
    batches = [_batch(task, words, rows[at : at + size], pad) for at in range(0, len(rows), size)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        if task == "GRPO":
            length = pad and pad // 4 or max(_in_128s(words(row["prompt"])["input_ids"]) for row in rows)
            trainer, trained = _learner(model, mesh, words, config, length, size, stop)
            losses, texts = [], size * config["num_generations"]
            places = [texts * (length + config["max_completion_length"])]
        else:
            trainer, losses = _trainer(task, model, mesh, config, stop)
            trained, places = trainer.model, [sum(_places(batch)) for batch in batches]
        pipe.send({"places": sum(places) / len(places)})
        facts: dict[str, Any] = {}

        def settle() -> None:
            jax.block_until_ready(nnx.state(trained))

        trainer.train(_taking_turns(batches, pipe, settle, segment, stop, facts))
    segments = [losses[at : at + segment] for at in range(0, stop, segment)]
    logs = [{"loss": sum(segment) / len(segment)} if segment else {} for segment in segments]
    pipe.send(facts | {"logs": logs, "compile s": sum(compiling), "peak MB": common.memory(), "device GB": 0.0})


def take_easydel(
    pipe: Connection, task: str, model: Path, rows: list[dict], config: dict, max_length: int, segment: int, stop: int
) -> None:
    """The same for EasyDeL; runs in the interpreter of EasyDeL's environment. All texts are padded to `max_length`, the
    prompts of GRPO to a quarter of it."""
    import easydel
    import jax
    from datasets import Dataset

    compiling, size, length = turns.count_compilation(), config["per_device_train_batch_size"], max_length
    seconds: list[float] = []
    losses: list[float] = []

    class Turns(getattr(easydel, f"{task}Trainer")):
        def on_step_start(self, state, step):
            if len(losses) % segment == 0:
                pipe.recv()
                self.start = time.perf_counter()
            return state

        def on_step_end(self, state, metrics, step):
            jax.block_until_ready(state.graphstate)
            losses.append(float(metrics.loss))
            if len(losses) == 1:
                seconds.append(time.perf_counter() - self.start)
            if len(losses) % segment == 0:
                pipe.send(time.perf_counter() - self.start)
            return state, metrics

    arguments = {
        "save_directory": config["output_dir"], "total_batch_size": size, "max_training_steps": stop,
        "num_train_epochs": stop, "max_length": length, "learning_rate": _RATES[task], "learning_rate_end": 0.0,
        "scheduler": "linear", "optimizer": "adamw", "weight_decay": 0.0, "clip_grad": 1.0, "do_last_save": False,
        "save_steps": None, "use_wandb": False, "shuffle_train_dataset": False, "log_steps": stop,
        "progress_bar_type": "json",
    }  # fmt: skip
    more, texts = {}, size
    if task == "DPO":
        arguments |= {"max_prompt_length": length // 2, "max_completion_length": length // 2}
        more, texts = {"reference_model": _easydel_model(model)}, 2 * size
    if task == "GRPO":
        group, longest = config["num_generations"], config["max_completion_length"]
        arguments |= {
            "total_batch_size": size // group, "num_return_sequences": group, "num_generations": group,
            "max_prompt_length": length // 4, "max_completion_length": longest, "max_length": length // 4 + longest,
            "beta": 0.0, "loss_type": "grpo", "top_k": None, "use_esurge_generation": False,
            "skip_apply_chat_template": True,
        }  # fmt: skip
        more, length = {"reward_funcs": [variety]}, length // 4 + longest
    trainer = Turns(
        arguments=getattr(easydel, f"{task}Config")(**arguments),
        model=_easydel_model(model),
        processing_class=sft_turns.tokenizer(model),
        train_dataset=Dataset.from_list([row for _ in range(stop) for row in rows]),
        **more,
    )
    pipe.send({"places": texts * length})
    trainer.train()
    logs = [{"loss": sum(losses[at : at + segment]) / segment} for at in range(0, stop, segment)]
    facts = {"first step s": seconds[0], "compile s": sum(compiling), "peak MB": common.memory(), "device GB": 0.0}
    pipe.send(facts | {"logs": logs})


def _easydel_model(folder: Path) -> Any:
    """EasyDeL's model with the folder's weights, in float32."""
    import easydel
    import jax
    import jax.numpy as jnp

    return easydel.AutoEasyDeLModelForCausalLM.from_pretrained(
        str(folder), dtype=jnp.float32, param_dtype=jnp.float32, precision=jax.lax.Precision.DEFAULT,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        config_kwargs={"attn_mechanism": easydel.AttentionMechanisms.SDPA, "attn_dtype": jnp.float32},
    )  # fmt: skip


def _taking_turns(
    batches: Sequence[Any], pipe: Connection, settle: Any, segment: int, stop: int, facts: dict
) -> Iterator[Any]:
    """Yield `stop` batches, cycling through `batches`. Waits for a request before each segment, and reports its seconds
    when the batch after it is requested."""
    start = 0.0
    for number in range(stop + 1):
        if number == 1:
            settle()
            facts["first step s"] = time.perf_counter() - start
        if number % segment == 0:
            if number:
                settle()
                pipe.send(time.perf_counter() - start)
            if number == stop:
                return
            pipe.recv()
            start = time.perf_counter()
        yield batches[number % len(batches)]


def _learner(model: Path, mesh: Any, words: Any, config: dict, length: int, prompts: int, stop: int) -> tuple[Any, Any]:
    """Tunix's GRPO learner, with its own generator, and the model that it trains.

    Args:
        length: length to which prompts are padded.
        prompts: number of prompts per step.
    """
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    completion, role = config["max_completion_length"], rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=_model(model, mesh),
        tokenizer=words,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((role.ACTOR, role.ROLLOUT), mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=_optimizer(_RATES["GRPO"], stop), eval_every_n_steps=stop + 1, max_steps=stop + 1,
                mini_batch_size=prompts, train_micro_batch_size=prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=completion, max_prompt_length=length, kv_cache_size=length + completion,
                temperature=1.0, top_p=1.0,
            ),
        ),
    )  # fmt: skip
    settings = grpo_learner.GRPOConfig(num_generations=config["num_generations"], beta=0.0)
    learner = grpo_learner.GRPOLearner(cluster, settings, variety)
    return learner, cluster.actor_trainer.model


def _optimizer(rate: float, stop: int) -> Any:
    """The optimizer of TRL's defaults."""
    import optax

    adamw = optax.adamw(optax.linear_schedule(rate, 0.0, stop), weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _trainer(task: str, model: Path, mesh: Any, config: dict, stop: int) -> tuple[Any, list[float]]:
    """Tunix's trainer with the optimizer of TRL's defaults, and the list to which its losses are appended."""
    from tunix.sft import hooks, peft_trainer, utils
    from tunix.sft.dpo import dpo_trainer

    losses: list[float] = []

    class Losses(hooks.TrainingHooks):
        def on_train_step_end(self, train_ctx, train_step, train_loss):
            losses.append(float(train_loss))

        def on_train_start(self, train_ctx): ...
        def on_train_end(self, train_ctx): ...
        def on_train_step_start(self, train_ctx): ...
        def on_eval_step_start(self, train_ctx): ...
        def on_eval_step_end(self, train_ctx, eval_loss): ...

    optimizer = _optimizer(_RATES[task], stop)
    sizes = {"eval_every_n_steps": stop + 1, "max_steps": stop}
    if task == "DPO":
        settings = dpo_trainer.DPOTrainingConfig(**sizes, beta=0.1)
        trainer = dpo_trainer.DPOTrainer(_model(model, mesh), _model(model, mesh), optimizer, settings)
    else:
        trainer = peft_trainer.PeftTrainer(_model(model, mesh), optimizer, peft_trainer.TrainingConfig(**sizes))
        trainer = trainer.with_gen_model_input_fn(
            lambda batch: {
                "input_tokens": batch.input_tokens,
                "input_mask": batch.input_mask,
                "positions": utils.build_positions_from_mask(batch.input_mask),
                "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
            }
        )
    trainer.with_training_hooks(Losses())
    return trainer, losses


def _model(folder: Path, mesh: Any) -> Any:
    """Tunix's qwen3 with the folder's weights, in float32."""
    import jax.numpy as jnp
    from transformers import AutoConfig
    from tunix.models.qwen3 import model, params

    published = AutoConfig.from_pretrained(folder)
    config = model.ModelConfig(
        num_layers=published.num_hidden_layers, vocab_size=published.vocab_size, embed_dim=published.hidden_size,
        hidden_dim=published.intermediate_size, num_heads=published.num_attention_heads, head_dim=published.head_dim,
        num_kv_heads=published.num_key_value_heads, norm_eps=published.rms_norm_eps,
        rope_theta=published.rope_parameters["rope_theta"], use_tied_embedding=published.tie_word_embeddings,
    )  # fmt: skip
    return params.create_model_from_safe_tensors(str(folder), config, mesh, dtype=jnp.float32)


def _batch(task: str, words: Any, rows: Sequence[dict], pad: int | None) -> Any:
    """A batch for Tunix's trainer: padded arrays, or prompts as text."""
    import numpy as np
    from tunix.sft import peft_trainer
    from tunix.sft.dpo import dpo_trainer

    if task == "GRPO":
        return {"prompts": np.array([row["prompt"] for row in rows])}
    if task == "SFT":
        ids, mask = _padded(words, [_ids(words, row["messages"]) for row in rows], pad)
        return peft_trainer.TrainingInput(input_tokens=ids, input_mask=mask)
    half = None if pad is None else pad // 2
    prompts, chosen, rejected = zip(*(_of_pair(words, row) for row in rows), strict=True)
    answers, masks = _padded(words, [*chosen, *rejected], half)
    prompt_ids, prompt_mask = _padded(words, prompts, half, left=True)
    return dpo_trainer.TrainingInput(
        prompt_ids=prompt_ids, prompt_mask=prompt_mask, chosen_ids=answers[: len(rows)], chosen_mask=masks[: len(rows)],
        rejected_ids=answers[len(rows) :], rejected_mask=masks[len(rows) :],
    )  # fmt: skip


def _places(batch: Any) -> list[int]:
    """The number of tokens that a step computes, padding included, for each text."""
    if hasattr(batch, "input_tokens"):
        return [batch.input_tokens.size]
    return [batch.prompt_ids.size + ids.size for ids in (batch.chosen_ids, batch.rejected_ids)]


def _padded(words: Any, texts: Sequence[Sequence[int]], length: int | None, *, left: bool = False) -> tuple[Any, Any]:
    import numpy as np

    length = length or max(map(_in_128s, texts))
    ids = np.full((len(texts), length), words.pad_token_id, np.int32)
    mask = np.zeros((len(texts), length), bool)
    for row, text in enumerate(texts):
        place = slice(length - len(text), length) if left else slice(len(text))
        ids[row, place], mask[row, place] = text, True
    return ids, mask


def _in_128s(ids: Sequence[int]) -> int:
    return -(-len(ids) // 128) * 128


def _of_pair(words: Any, row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Ids of the prompt (with the generation prompt) and of both answers."""
    prompt = _ids(words, row["prompt"], add_generation_prompt=True)
    chosen, rejected = (_ids(words, row["prompt"] + row[side])[len(prompt) :] for side in ("chosen", "rejected"))
    return prompt, chosen, rejected


def _ids(words: Any, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
    return words.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)
