"""The command `trl-jax chat`: chat with a language model in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_jax.scripts.loaded_model import FieldsParser, LoadedModel, add_model_flags

if TYPE_CHECKING:
    from trl_jax.hub.generation_inputs import Settings


_HELP = "/exit or Ctrl-D quits, /clear starts over, /undo removes the last question and its answer."


@dataclass
class ChatArguments:
    """Arguments of the command.

    model: folder or Hub name.
    system: the system message.
    seed: None means a different one each time.
    image: picture files, shown before the first question.
    fields: fields of a GenerationConfig.
    """

    model: str
    system: str | None = None
    seed: int | None = None
    image: list[str] = field(default_factory=list)
    dtype: str = "auto"
    bf16: bool = False
    mesh_shape: str | None = None
    trust_remote_code: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


class Parser(FieldsParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[ChatArguments]:
        arguments, fields = self.parse_both(argv)
        return (ChatArguments(**arguments, fields=fields),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(prog=prog, description=f"Chat with a language model. {_HELP}")
    parser.add_argument("model", help="folder or Hub name of the language model")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--seed", type=int, help="seed for sampling (default: a different one each time)")
    parser.add_argument(
        "--image", action="append", default=[], help="picture to talk about, before the first question (repeatable)"
    )
    add_model_flags(parser)
    return parser


def main(args: ChatArguments) -> None:
    """Chat until stdin ends.

    Raises:
        ValueError: the tokenizer has no chat template, or a field is out of range.
    """
    from trl_jax.core.torch_random import set_seed

    model = LoadedModel.find(
        args.model, args.dtype, trust_remote_code=args.trust_remote_code, mesh_shape=args.mesh_shape,
        images=bool(args.image),
    )  # fmt: skip
    if args.seed is not None:
        set_seed(args.seed)
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages, answer = list(start), Answerer(model, args)
    print(_HELP, file=sys.stderr)
    while (line := _read()) is not None:
        match line.strip():
            case "/exit":
                return
            case "/clear":
                messages = list(start)
            case "/undo":
                messages = messages[: max(len(start), len(messages) - 2)]
            case "":
                pass
            case text:
                messages += [{"role": "user", "content": text}]
                messages += [{"role": "assistant", "content": answer(messages)}]


def _read() -> str | None:
    """A line of stdin; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _drop_default_lengths(settings: Settings) -> Any:
    """The GenerationConfig without default lengths, which `generate` would mistake for values that the user set."""
    if settings.default_max_length:
        settings.config.max_length = None
    if settings.default_min_length:
        settings.config.min_length = None
    return settings.config


class Answerer:
    """Answers a conversation, and prints the answer while it is generated."""

    def __init__(self, model: LoadedModel, args: ChatArguments):
        self._model, self._tokenizer, self._reader = model.load(), model.tokenizer, model.prompt_tokenizer()
        self._config = _drop_default_lengths(model.settings(args.fields))
        self._dtype = "bfloat16" if args.bf16 else None
        self._pictures, self._processor, self._arrays = [], None, {}
        if args.image:
            from trl_jax.hub.vision.processor import open_picture

            self._pictures, self._processor = list(map(open_picture, args.image)), model.vision_processor()
            self._arrays = self._processor.arrays(self._pictures)

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation, with its pictures."""
        from trl_jax.data.chat_templates import prepare_multimodal_messages
        from trl_jax.data.prompts import encoded_prompts
        from trl_jax.hub.generation_inputs import encoded_prompt

        if self._processor is None:
            return encoded_prompt(messages, self._reader, "The conversation")
        [ids], _ = encoded_prompts([prepare_multimodal_messages(messages, self._pictures)], self._processor)
        return ids

    def __call__(self, messages: list[dict[str, str]]) -> str:
        from transformers import TextStreamer

        from trl_jax.hub.generation_inputs import decoded

        ids = self._encode(messages)
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        options = {"generation_config": self._config, "tokenizer": self._tokenizer, "dtype": self._dtype}
        [row] = self._model.generate(
            [ids], attention_mask=[[1] * len(ids)], streamer=streamer, **self._arrays, **options
        )
        return decoded(row[len(ids) :].tolist(), self._tokenizer)
