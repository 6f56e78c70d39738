"""The command `trl-jax generate`: complete the prompts of a file with a language model."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_jax.scripts.loaded_model import FieldsParser, LoadedModel, add_model_flags
from trl_jax.scripts.rows import Job, Output, Row, add_output_flags, read_rows, to_stdout
from trl_jax.training.checkpoint_files import digest

if TYPE_CHECKING:
    from trl_jax.data.images import TextImages
    from trl_jax.hub.generate import Completion
    from trl_jax.hub.vision.processor import EncodedText, VisionProcessor


PROMPTS, COLUMN = ("prompt", "messages", "text"), "completion"
_WINDOW = 4  # number of batches within which rows are sorted by length


def _added_columns(row: dict[str, Any]) -> tuple[str, ...]:
    return (COLUMN,)


_JOB = Job(
    command="trl-jax generate",
    verb="complete",
    done="completed",
    read=lambda source: read_rows(source, _added_columns),
    added_columns=_added_columns,
    check=lambda value: None if isinstance(value, str | list) else "text",
    result=lambda row: None,
)


@dataclass
class GenerateArguments:
    """Arguments of the command.

    model: folder or Hub name.
    file: jsonl; None means lines of stdin.
    image: picture files for every prompt.
    output: jsonl; None means stdout.
    fields: fields of a GenerationConfig.
    """

    model: str
    file: str | None = None
    output: str | None = None
    overwrite: bool = False
    batch_size: int = 16
    seed: int = 42
    dtype: str = "auto"
    bf16: bool = False
    mesh_shape: str | None = None
    trust_remote_code: bool = False
    quiet: bool = False
    image: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


class Parser(FieldsParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[GenerateArguments]:
        arguments, fields = self.parse_both(argv)
        return (GenerateArguments(**arguments, fields=fields),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Complete prompts. A row of the jsonl file has a `prompt` (text or a conversation), `messages` or "
        "`text`. Its `completion` is added, which is a list if --num_return_sequences is above 1. Without FILE, each "
        "line of stdin is a prompt. Pictures of a row are paths in its columns `image` or `images`, or in parts of "
        "its messages; a text without placeholders for them becomes a user message.",
    )
    parser.add_argument("model", help="folder or Hub name of the language model")
    parser.add_argument("file", nargs="?", help="jsonl file of rows to complete (default: lines of stdin)")
    add_output_flags(parser)
    parser.add_argument("--batch_size", type=int, default=16, help="completions computed at once (default: 16)")
    parser.add_argument("--seed", type=int, default=42, help="seed for sampling (default: 42)")
    parser.add_argument("--image", action="append", default=[], help="picture that every prompt is about (repeatable)")
    add_model_flags(parser)
    return parser


def main(args: GenerateArguments) -> None:
    """Complete every row. If interrupted, completed rows are kept.

    Raises:
        ValueError: a line is not a row, a field is out of range, or the output belongs to another run.
    """
    if args.batch_size < 1:
        raise ValueError(f"--batch_size must be at least 1, got {args.batch_size}.")
    if args.file is None and args.output is not None:
        raise ValueError("--output needs a FILE of rows. For prompts from stdin, redirect stdout to a file.")
    source = None if args.file is None else Path(args.file)
    if source is not None and not source.is_file():
        raise FileNotFoundError(f"{args.file}: no such file.")
    output = None if args.output is None else Output(_JOB, args.output, source, args.overwrite)
    rows = list(_stdin_rows() if source is None else _JOB.read(source))
    if not rows:
        return
    model = LoadedModel.find(
        args.model, args.dtype, trust_remote_code=args.trust_remote_code, mesh_shape=args.mesh_shape,
        images=bool(args.image) or any(map(_has_pictures, rows)),
    )  # fmt: skip
    _report_idle_devices(args)
    completer = Completer(model, args, rows)
    mark = {"--seed": args.seed, "--bf16": args.bf16, "--dtype": args.dtype, **model.digests()}
    mark |= {f"--{name}": value for name, value in args.fields.items()}
    mark |= {"--image": [digest(Path(name)) for name in args.image]} if args.image else {}
    if completer.dtype.name != ("bfloat16" if args.bf16 else "float32"):
        mark |= {"compute dtype": completer.dtype.name}
    with (
        contextlib.nullcontext(to_stdout()) if output is None else output.running(mark) as (done, write),
        _progress_bar(write, len(rows), len(done), args.quiet) as take,
    ):
        completer(len(done), take)


def _report_idle_devices(args: GenerateArguments) -> None:
    import jax

    devices = jax.device_count()
    if args.mesh_shape is None and devices > 1 and not args.quiet:
        message = f"Using 1 of {devices} devices. Pass --mesh_shape data:{devices} to use all of them."
        print(message, file=sys.stderr)


class Completer:
    """Completes rows with a model. A row's tokens depend only on the seed and the row's number.

    Raises:
        ValueError: a row has no prompt, or a field is out of range.
    """

    def __init__(self, model: LoadedModel, args: GenerateArguments, rows: list[Row]):
        from trl_jax.core.torch_random import TorchGenerator
        from trl_jax.hub.generate import Batches, computing_dtype

        self._rows, self._tokenizer = rows, model.tokenizer
        settings = model.settings(args.fields)
        self.dtype = computing_dtype(model.load(), "bfloat16" if args.bf16 else None)
        self._group, images = settings.completions, None
        if args.image or any(map(_has_pictures, rows)):
            prompts = _PicturePrompts(model.vision_processor(), args.image, rows)
            ids, images = [prompts(number).ids.tolist() for number in range(len(rows))], prompts.images
        else:
            reader = model.prompt_tokenizer()
            ids = [_ids(row, reader) for row in rows]
        self._batches = Batches(
            model.load(), settings, ids, stream=TorchGenerator(args.seed), batch_size=args.batch_size,
            dtype=self.dtype, tokenizer=model.tokenizer, window=_WINDOW * args.batch_size, images=images,
        )  # fmt: skip

    def __call__(self, first: int, take: Callable[[dict[str, Any], int], None]) -> None:
        """Complete the rows from number `first` on, and pass each to `take`, in order, with its count of new tokens."""
        done: dict[int, list[int]] = {}  # completions that wait for an earlier row to finish
        number = first

        def collect(completions: list[Completion]) -> None:
            nonlocal number
            done.update({completion.number: completion.generated_tokens for completion in completions})
            while number < len(self._rows) and all(index in done for index in self._completions(number)):
                ids = [done.pop(index) for index in self._completions(number)]
                texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
                row = self._rows[number].content | {COLUMN: texts if self._group > 1 else texts[0]}
                take(row, sum(map(len, ids)))
                number += 1

        if first < len(self._rows):
            self._batches(collect, first)

    def _completions(self, number: int) -> range:
        return range(number * self._group, (number + 1) * self._group)


def _prompt(row: Row) -> tuple[str, Any, dict[str, Any]]:
    """The column of the row's prompt, the prompt, and arguments of the chat template."""
    [column, *_] = [name for name in PROMPTS if name in row.content] or [None]
    if column is None:
        raise ValueError(
            f"{row.where} must have the column {' or '.join(PROMPTS)}, got {', '.join(row.content) or 'no columns'}."
        )
    options = dict(row.content.get("chat_template_kwargs", {}))
    options |= {"tools": row.content["tools"]} if "tools" in row.content else {}
    return column, row.content[column], options


def _ids(row: Row, tokenizer: Any) -> list[int]:
    from trl_jax.hub.generation_inputs import encoded_prompt

    column, prompt, options = _prompt(row)
    ids = encoded_prompt(prompt, tokenizer, f"{row.where}: the prompt", **options)
    if not ids:
        raise ValueError(f"{row.where} has an empty {column}. Write at least one word, or remove the row.")
    return ids


def _has_pictures(row: Row) -> bool:
    from trl_jax.data.image_rows import pictures_of

    conversations = [row.content[name] for name in PROMPTS if isinstance(row.content.get(name), list)]
    messages = [message for conversation in conversations for message in conversation if isinstance(message, dict)]
    return bool(pictures_of(row.content)) or any(map(_has_image_part, messages))


def _has_image_part(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


class _PicturePrompts:
    """Encodes rows with pictures as prompts of a vision-language model. Pictures are read on each call, because those
    of all rows may not fit into memory."""

    def __init__(self, processor: VisionProcessor, pictures: list[str], rows: list[Row]):
        """
        Args:
            pictures: files for every prompt.

        Raises:
            ValueError: there are such files, but a row has pictures of its own.
        """
        from trl_jax.data.chat import PartsTokenizer

        self._processor, self._pictures, self._rows = processor, pictures, rows
        self._reader = PartsTokenizer(processor.tokenizer)  # for rows without pictures
        for row in filter(_has_pictures, rows if pictures else ()):
            raise ValueError(f"{row.where} has pictures of its own. Leave --image out, or name its files in every row.")

    def images(self, number: int) -> TextImages:
        return self(number).images

    def __call__(self, number: int) -> EncodedText:
        """The ids and images of a prompt.

        Raises:
            ValueError: a picture cannot be read, or the numbers of placeholders and pictures differ.
        """
        import numpy as np

        from trl_jax.data.chat_templates import prepare_multimodal_messages
        from trl_jax.data.image_rows import pictures_of, without_null
        from trl_jax.data.prompts import encoded_messages, is_conversation
        from trl_jax.hub.generation_inputs import encoded_prompt
        from trl_jax.hub.vision.processor import EncodedText

        row, processor = self._rows[number], self._processor
        if not (self._pictures or _has_pictures(row)):
            ids = np.asarray(_ids(row, self._reader), np.int32)
            return EncodedText(ids, processor.placed(ids, ()))
        _, prompt, options = _prompt(row)
        pictures = pictures_of(row.content) or self._pictures
        if isinstance(prompt, str) and processor.placeholder not in prompt:
            prompt = [{"role": "user", "content": prompt}]
        try:
            if isinstance(prompt, str):
                return processor.encode(prompt, pictures, add_special_tokens=True)
            if not is_conversation(prompt):
                encoded_prompt(prompt, processor.tokenizer)  # raises
            continues = prompt[-1]["role"] == "assistant"
            options |= {"add_generation_prompt": not continues, "continue_final_message": continues}
            messages = prepare_multimodal_messages(without_null(prompt), pictures)
            return encoded_messages(messages, processor, "the prompt", **options)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error


def _stdin_rows() -> Iterator[Row]:
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield Row(f"stdin, line {number}", {"prompt": line.rstrip("\n")})


@contextlib.contextmanager
def _progress_bar(
    write: Callable[[dict[str, Any]], None], total: int, done: int, quiet: bool
) -> Iterator[Callable[[dict[str, Any], int], None]]:
    """A function take(row, tokens) that writes the row and advances a progress bar."""
    from tqdm import tqdm

    tokens, begin = 0, time.monotonic()
    with tqdm(total=total, initial=done, unit=" rows", disable=quiet, file=sys.stderr) as bar:

        def take(row: dict[str, Any], count: int) -> None:
            nonlocal tokens
            write(row)
            tokens += count
            bar.set_postfix_str(f"{tokens / (time.monotonic() - begin):,.0f} tokens/s", refresh=False)
            bar.update()

        yield take
