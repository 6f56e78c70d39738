"""`trl-jax check`: read a TRL script without running it, and report what works, behaves differently or is refused
here."""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import transformers

from trl_jax.cli.findings import (
    BY_CONFIG,
    BY_TRAINER,
    KINDS,
    PACKAGES,
    TORCH_OPTIMIZERS,
    Finding,
    argument_findings,
    attributes_of,
    bind_trainers,
    config_findings,
    config_of,
    defined_names,
    has_name,
    is_installed,
    is_provided,
    methods,
    module_exists,
    package_of,
    prefixes,
    provided_names,
    public_api,
    quantization_findings,
    short_name,
    split_path,
    trainer_of,
    try_call,
)
from trl_jax.cli.reading import (
    Attribute,
    Call,
    CallResult,
    Defined,
    Imported,
    Meaning,
    Method,
    Module,
    Name,
    Self,
    Super,
    arguments_of,
    bases,
    meanings,
    read,
    value_of,
)
from trl_jax.cli.torch_for_scripts import ADVICE as TORCH_ADVICE
from trl_jax.cli.torch_for_scripts import names_to_miss
from trl_jax.cli.transformers_patches import needs_torch
from trl_jax.cli.trl_alias import ADVICE, spec_of, stands_in
from trl_jax.config.renamed import RENAMED, current_name, way_out
from trl_jax.core.secrets import CleanParser, cleaned
from trl_jax.core.trainers import NEAR, TrainerNames, check_not_experimental
from trl_jax.legacy.arguments import is_ignored_argument, moved_arguments
from trl_jax.trainer.overrides import OF_TORCH, OLD_COMPUTE_LOSS

# The command


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        return (self.parse_args(argv),)


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Read a TRL script or notebook without running it, and report for every name imported from trl, "
        "every argument and every overridden method whether it works under `python -m trl_jax`, behaves differently "
        "here, or is refused. The script's own modules are read, too.",
        epilog="Values that are known only when the script runs, such as datasets and checkpoints, are not checked: "
        "`trl-jax compare` runs the first steps.",
    )
    parser.add_argument("script", help="a script (.py) or notebook (.ipynb) that imports trl or trl_jax")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print one line per finding, and a verdict.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: the script is not valid Python.
    """
    path = Path(args.script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    try:
        module = read(path.read_text(encoding="utf-8"), path)
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, null bytes, or no notebook
        kind = "notebook of Python cells" if path.suffix == ".ipynb" else "Python"
        raise ValueError(f"{args.script} is not a valid {kind}: {error}".replace("a valid Py", "valid Py")) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{args.script}: an expression is nested too deeply to read.") from None
    print("\n".join(map(cleaned, report(findings(module)))))


def report(all_findings: list[Finding]) -> list[str]:
    """One line per finding, in the order of the script, and the verdict."""
    if not all_findings:
        return ["The script uses nothing from trl."]
    lines = [f"{f.place:>5}  {f.what}: {f.kind}" + (f". {f.text}" if f.text else "") for f in all_findings]
    count = {kind: sum(finding.kind == kind for finding in all_findings) for kind in KINDS}
    refused, unknown, changed = count["refused"], count["not known"], count["changed"]
    missing = ", ".join(dict.fromkeys(finding.what for finding in all_findings if finding.kind == "not installed"))
    if refused:
        are, them = ("is", "it") if refused == 1 else ("are", "them")
        verdict = f"{refused} of {len(all_findings)} {are} refused: change {them} as described, then run the script."
    elif unknown:
        verdict = (
            f"Nothing is refused, but {unknown} of {len(all_findings)} cannot be judged before the script runs: try "
            "its first steps with `trl-jax compare`."
        )
    elif changed:
        differently = f"{changed} of {len(all_findings)} behave{'s' * (changed == 1)} differently here"
        verdict = f"The script runs unchanged, if its data and checkpoints fit; {differently}."
    else:
        verdict = "The script runs unchanged, if its data and checkpoints fit."
    if missing:
        verdict = f"Not installed here: {missing}. With it: " + verdict[0].lower() + verdict[1:]
    return [*lines, "", verdict]


# Findings: construct the configs and subclasses of the script, without model or data, and see what happens


_IN_JAX = "Write it in jax.numpy, so that it is compiled together with the model and its gradient."
_IN_TORCH = "It uses torch: the outputs of each batch are copied to torch, and their gradient back. "
_INSTALLED_TRL = "The installed trl's: it trains with torch, and its arguments are not checked."
_STANDS_IN = "Not installed here; python -m trl_jax has this name."
_NO_TOKENIZER = (
    "The script sets a chat template, but this trainer loads its own tokenizer, which may not have one. Pass "
    "processing_class=tokenizer."
)
_TEMPLATE = (
    "Since transformers 5, it returns a dict of input_ids and attention_mask, also under TRL. If the script expects "
    "only the token ids, pass return_dict=False."
)
_PASS_NUM_ITEMS = ("SFTConfig", "DPOConfig", "KTOConfig")  # of trainers that call compute_loss with num_items_in_batch
_WITH_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
# Packages whose names are checked; for others, only whether they are installed.
_CHECKED = ("transformers", "peft", "datasets", "accelerate", "huggingface_hub", "torch")


def findings(script: Module) -> list[Finding]:
    """All findings in a script and its own modules, ordered by line."""
    modules = _with_local_imports(script)
    bind_trainers(modules)
    checker = _Script(modules)
    all_findings: list[Finding] = []
    for module in modules:
        module_findings = [Finding(line, "code", "not known", text) for line, text in module.skipped]
        module_findings += checker.name_findings(module)
        module_findings += _undefined_names(module)
        for call in module.calls:
            module_findings += checker.call_findings(call)
        for definition in module.classes:
            module_findings += checker.class_findings(definition)
        for attribute in module.attributes:
            module_findings += checker.attribute_findings(attribute)
        module_findings = sorted(module_findings, key=lambda finding: finding.line)
        all_findings += [finding._replace(place=module.place(finding.line)) for finding in module_findings]
    reported, seen = [], set()
    for finding in all_findings:
        if "(" in finding.what or (finding.what, finding.kind) not in seen:  # names and attributes: their first use
            reported.append(finding)
        seen.add((finding.what, finding.kind))
    return reported


def _with_local_imports(script: Module) -> list[Module]:
    """A module and the script's own modules that it imports, without duplicates."""
    modules = [script]
    for module in modules:
        modules += [inner for inner in module.inner if inner not in modules]
    return modules


class _Script:
    """Facts about the whole script that findings on its parts depend on.

    Attributes:
        called: paths of everything that is called or subclassed.
        assigned: names of attributes that are set somewhere, or checked with hasattr.
    """

    def __init__(self, modules: list[Module]):
        self.modules = modules
        calls = [call for module in modules for call in module.calls]
        used = [meaning for call in calls for meaning in meanings(call.node.func, call.scope)]
        used += [base for module in modules for definition in module.classes for base in bases(definition)]
        self.called = {part for meaning in used if isinstance(meaning, Imported) for part in prefixes(meaning.path)}
        attributes = [attribute for module in modules for attribute in module.attributes]
        self.assigned = {attribute.node.attr for attribute in attributes if attribute.value is not None}
        self.assigned.update(*(module.checked_names for module in modules))
        self.configs = [names.load_config() for meaning in used if (names := trainer_of(meaning)) is not None]

    # Names

    def name_findings(self, module: Module) -> Iterator[Finding]:
        inner = {id(attribute.node.value) for attribute in module.attributes}
        for name in module.names:
            yield from self._import_findings(name)
        for attribute in module.attributes:
            if id(attribute.node) not in inner and attribute.value is None:
                for meaning in meanings(attribute.node, attribute.scope):
                    if isinstance(meaning, Imported) and package_of(meaning.path) in PACKAGES:
                        yield from self._import_findings(split_path(meaning.path, attribute.node.lineno))
        prepared = any(name.guarded and package_of(name.module) == "torch" for name in module.names)
        if not is_installed("torch") and not prepared:
            for line, path in names_to_miss(module):
                yield Finding(line, path, "not installed", f"The script stops here. {TORCH_ADVICE}")

    def _import_findings(self, name: Name) -> Iterator[Finding]:
        """The finding on a name that is imported from a package."""
        package = package_of(name.module)
        path = f"{name.module}.{name.name}".removesuffix(".")
        if package in PACKAGES:
            if name.name:
                finding = self._trl_name_finding(name, path)
                yield _soften(finding) if name.guarded else finding
            elif not module_exists(name.module):
                finding = _missing_module(name)
                yield _soften(finding) if name.guarded else finding
        elif package == "unsloth":
            finding = Finding(name.line, package, "refused", ADVICE["unsloth"])
            yield _soften(finding) if name.guarded else finding
        elif name.guarded or (package == "IPython" and self.modules[0].cells):
            return
        elif not is_installed(name.module):
            what = package if not is_installed(package) else name.module
            if what == package and stands_in(name.module, name.name):
                yield Finding(name.line, path, "changed", _STANDS_IN)
            else:
                advice = TORCH_ADVICE if package == "torch" else ADVICE.get(package, "")
                yield Finding(name.line, what, "not installed", f"The script stops at this import. {advice}".rstrip())
        elif package == "transformers" and not is_installed("torch") and needs_torch(name.name):
            yield Finding(name.line, path, "not installed", "It needs torch, and raises an error when it is used.")
        elif package in _CHECKED and name.name not in ("", "*") and not _may_have(name.module, name.name):
            text = f"The installed {package} has no such name, so the script stops at this import, under TRL, too."
            yield Finding(name.line, path, "refused", text)

    def _trl_name_finding(self, name: Name, path: str) -> Finding:
        """The finding on a name of trl, or of trl_jax."""
        is_used = path in self.called
        if name.name == "*":
            return Finding(name.line, path, "not known", "The names that the script takes from it are not known.")
        if is_provided(name.module, name.name):
            if name.name in _WITH_MATH_VERIFY and not is_installed("math_verify"):
                return Finding(name.line, "math_verify", "not installed", f"{path} needs it.")
            return Finding(name.line, path, "works")
        if not module_exists(name.module):
            return _missing_module(name)
        of_trl, trl_installed = package_of(name.module) == "trl", spec_of("trl") is not None
        if of_trl and trl_installed and has_name(name.module, name.name) is not False:
            if name.module.startswith("trl.experimental"):
                return Finding(name.line, path, "changed", _INSTALLED_TRL)
            text = "Not in trl_jax: python -m trl_jax takes it from the installed trl."
            if is_used and name.name.endswith(("Callback", "Trainer")):
                text += " It is written for a torch model, and may not work with a trainer of trl_jax."
                return Finding(name.line, path, "not known", text)
            return Finding(name.line, path, "changed", text)
        if name.module.removesuffix(".trainer") in PACKAGES:
            try:
                check_not_experimental(name.name)
            except ImportError as error:
                return Finding(name.line, path, "refused", str(error))
            if name.name in NEAR:
                near = f" Closest: {NEAR[name.name]}." if NEAR[name.name] else ""
                text = f"It can be imported but not used: trl_jax does not implement it.{near}"
                return Finding(name.line, path, "refused" if is_used else "changed", text)
        if of_trl and not trl_installed and name.module != "trl":
            return Finding(name.line, path, "not installed", "Not in trl_jax: it takes an installed trl.")
        candidates = public_api() if name.module in PACKAGES else provided_names(name.module)
        close = ", ".join(difflib.get_close_matches(name.name, candidates, n=1))
        text = "There is no such name, so the script stops at this import"
        return Finding(name.line, path, "refused", f"{text}: did you mean {close}?" if close else f"{text}.")

    # Calls

    def call_findings(self, call: Call) -> Iterator[Finding]:
        line = call.node.lineno
        for meaning in dict.fromkeys(meanings(call.node.func, call.scope)):
            names, config = trainer_of(meaning), config_of(meaning)
            if names is not None:
                yield from self._trainer_findings(call, meaning, names)
            elif config is not None:
                yield from config_findings(call, meaning, config)
            elif meaning == Imported("transformers.TrainingArguments") and self.configs:
                yield from config_findings(call, meaning, self.configs[0])
            elif isinstance(meaning, Method) and meaning.name in (*BY_TRAINER, *BY_CONFIG):
                text = "Whether it is TRL's is known only when the script runs."
                yield Finding(line, f"{meaning.name}(...)", "not known", text)
            elif isinstance(meaning, Imported) and _is_foreign_trainer(meaning.path):
                text = "Another package's trainer, which is not read."
                yield Finding(line, f"{meaning.path}(...)", "not known", text)
            elif meaning in (Imported("transformers.Trainer"), Imported("transformers.Seq2SeqTrainer")):
                yield Finding(line, f"{meaning.path}(...)", "changed", "transformers' trainer: it trains with torch.")
        if any(keyword.arg == "quantization_config" for keyword in call.node.keywords):
            yield from quantization_findings(call)
        if isinstance(call.node.func, ast.Attribute) and call.node.func.attr == "apply_chat_template":
            yield from _chat_template_findings(call)

    def _trainer_findings(self, call: Call, meaning: Meaning, names: TrainerNames) -> Iterator[Finding]:
        trainer, name = names.load_trainer(), short_name(meaning)
        parameters = [parameter for parameter in inspect.signature(trainer.__init__).parameters if parameter != "self"]
        old_names = trainer._traits.old_arguments
        config_fields = {field.name for field in fields(names.load_config())}
        defines_init = isinstance(meaning, Defined) and "__init__" in methods(meaning)
        arguments, has_unknown = arguments_of(call.node, call.scope, [] if defines_init else parameters)
        line = call.node.lineno
        if has_unknown:
            yield Finding(line, f"{name}(**...)", "not known", "These arguments are made when the script runs.")
        if _edits_chat_template(call.scope.module, line) and not (
            has_unknown or defines_init or {"processing_class", "tokenizer"} & arguments.keys()
        ):
            yield Finding(line, f"{name}(...)", "not known", _NO_TOKENIZER)
        for argument, value in arguments.items():
            what = f"{name}({argument}=...)"
            if argument in old_names:
                yield Finding(line, what, "changed", f"An old name: {old_names[argument]}")
            elif argument in parameters:
                yield from argument_findings(line, what, trainer, argument, value) or [Finding(line, what, "works")]
            elif defines_init:
                continue
            elif argument == "tokenizer":
                yield Finding(line, what, "changed", "An old name: pass it as processing_class.")
            elif argument in moved_arguments(trainer) and "args" in arguments and arguments["args"].value is not None:
                text = f"Now an argument of {names.config}."
                yield Finding(
                    line, what, "changed", text if argument in config_fields else f"An old name: {RENAMED[argument]}"
                )
            elif is_ignored_argument(trainer, argument):
                yield Finding(line, what, "changed", f"It has no effect. An old name: {RENAMED[argument]}")
            elif argument in config_fields or argument in moved_arguments(trainer):
                advice = f"Pass args={names.config}({current_name(argument) or argument}=...)."
                yield Finding(line, what, "refused", f"{name} has no argument {argument!r}. {advice}")
            else:
                text = f"{name} has no argument {argument!r}: {way_out(argument, parameters)}"
                yield Finding(line, what, "refused", text)

    # Subclasses

    def class_findings(self, definition: Defined) -> Iterator[Finding]:
        """Define a subclass for each overridden method, with only that method."""
        names = trainer_of(definition)
        if names is None:
            return
        trainer, module = names.load_trainer(), definition.scope.module
        for method, node in methods(definition).items():
            what = f"{definition.node.name}.{method}"
            define = partial(type, definition.node.name, (trainer,), {method: lambda self: None})
            finding = try_call(node.lineno, what, define)
            lacks_items = method == "compute_loss" and names.config in _PASS_NUM_ITEMS and not _takes_num_items(node)
            if finding.kind == "works" and lacks_items:
                finding = Finding(node.lineno, what, "refused", f"It takes no num_items_in_batch{OLD_COMPUTE_LOSS}")
            elif finding.kind == "works" and method in _LOSSES and (text := _loss_failure(node, trainer)):
                finding = Finding(node.lineno, what, "refused", text)
            elif finding.kind == "works" and "loss" in method and _uses_torch(node, module):
                compiled = "_get_per_token_divergences" in dir(trainer)  # distillation
                text = _IN_JAX if compiled else _IN_TORCH + _IN_JAX
                finding = Finding(node.lineno, what, "refused" if compiled else "changed", text)
            elif finding.kind == "works" and method == "prediction_step" and _uses_torch(node, module):
                finding = Finding(node.lineno, what, "changed", _IN_TORCH + _IN_JAX)
            elif finding.kind == "works" and method == "create_optimizer" and _creates_refused_optimizer(node, module):
                finding = Finding(node.lineno, what, "refused", OF_TORCH)
            yield finding

    # Attributes of trainers

    def attribute_findings(self, used: Attribute) -> Iterator[Finding]:
        """Uses of trainer attributes that our trainers do not have, or do not read."""
        for meaning in dict.fromkeys(meanings(used.node.value, used.scope)):
            match meaning:
                case CallResult():
                    owner = meaning.callee
                case Self() | Super():
                    owner = meaning.owner
                case Imported() if used.value is not None:  # set on the class
                    owner = meaning
                case _:
                    continue
            if (names := trainer_of(owner)) is None:
                continue
            if used.value is not None:
                finding = _write_finding(used, owner, names.load_trainer())
            elif used.node.attr in self.assigned:
                finding = None
            else:
                finding = _read_finding(used, owner, names.load_trainer())
            if finding is not None:
                yield finding


def _write_finding(used: Attribute, owner: Meaning, trainer: type) -> Finding | None:
    """The finding on an attribute of a trainer that the script sets."""
    name, line = used.node.attr, used.node.lineno
    what, text = f"{short_name(owner)}.{name} = ...", ""
    refused = trainer._traits.refused
    never_called = {**refused.never_called, **refused.once_called}
    if name in refused.never_read:
        text = f"trl_jax never reads it. {refused.never_read[name]}"
    elif name in never_called:
        text = f"trl_jax never calls it. {never_called[name]}"
    elif name in refused.of_the_class:
        text = f"trl_jax calls the class's method instead. Define {name} in a subclass of {trainer.__name__}."
    return Finding(line, what, "refused", text) if text else None


def _read_finding(used: Attribute, owner: Meaning, trainer: type) -> Finding | None:
    """The finding on an attribute of a trainer that the script reads, or a method that it calls."""
    name, line = used.node.attr, used.node.lineno
    defined = defined_names(owner) if isinstance(owner, Defined) else set()
    if name == "_logs" and name not in defined and name in attributes_of(trainer):
        return Finding(line, f"{short_name(owner)}._logs", "changed", "Copies, with log_completions=True alone.")
    if name in defined or name in attributes_of(trainer) or name.startswith("__"):
        return None
    what = f"{short_name(owner)}.{name}"
    if "*" in defined:
        return Finding(line, what, "not known", "A base class of the script's is not read, and may have it.")
    text = f"{trainer.__name__} of trl_jax has no such attribute."
    refused = trainer._traits.refused
    if (instead := {**refused.never_called, **refused.never_there}.get(name)) is not None:
        text += f" {instead}"
    elif name.startswith("_"):
        text += " It is a private one of TRL's."
    return Finding(line, what, "refused", text)


def _chat_template_findings(call: Call) -> Iterator[Finding]:
    """The finding on `apply_chat_template(...)` whose result is used as token ids, which it was before transformers
    5."""
    keywords = {keyword.arg: keyword.value for keyword in call.node.keywords}
    as_text = value_of(keywords["tokenize"], call.scope) if "tokenize" in keywords else True
    if None in keywords or "return_dict" in keywords or as_text is False:
        return
    targets = [
        name
        for name, bindings in call.scope.bindings.items()
        for binding in bindings
        if isinstance(binding.value, ast.AST) and any(part is call.node for part in ast.walk(binding.value))
    ]
    mappings = call.scope.module.mappings
    if id(call.node) in mappings or not mappings.isdisjoint(targets):
        return
    kind = "refused" if targets else "not known"
    yield Finding(call.node.lineno, "apply_chat_template(...)", kind, _TEMPLATE)


# Names of packages


def _soften(finding: Finding) -> Finding:
    """Soften the finding on an import that may not be reached, or whose failure is caught."""
    if finding.kind not in ("refused", "not installed"):
        return finding
    return finding._replace(kind="changed", text=f"If this line is reached, it fails. {finding.text}")


def _missing_module(name: Name) -> Finding:
    path = f"{name.module}.{name.name}".removesuffix(".")
    if package_of(name.module) == "trl" and spec_of("trl") is None:
        return Finding(name.line, path, "not installed", f"{name.module} is not in trl_jax: it takes an installed trl.")
    searched = "trl_jax" if package_of(name.module) == "trl_jax" else "trl_jax, nor in the installed trl"
    near = NEAR.get(name.name, "")
    text = f"There is no module {name.module} in {searched}." + (f" Closest: {near}." if near else "")
    return Finding(name.line, path, "refused", text)


def _undefined_names(module: Module) -> Iterator[Finding]:
    """Names that a module's top-level statements read but nothing defines."""
    for node in module.reads:
        if node.id in _DEFINED or node.id in module.globals or module.top.find(node.id, node.lineno):
            continue
        if module.skipped or module.open_ended:
            yield Finding(node.lineno, node.id, "not known", "What defines this name is not read.")
        else:
            yield Finding(node.lineno, node.id, "refused", "This name is not defined, under TRL, too.")


_DEFINED = {*vars(builtins), "__file__", "__builtins__", "__annotations__", "display", "get_ipython", "In", "Out"}


def _edits_chat_template(module: Module, line: int) -> bool:
    """Whether a module sets a tokenizer's chat template, but does not save it before this line for a trainer to
    load."""
    called = {_last_name(call.node.func) for call in module.calls if call.node.lineno < line}
    assigned = {attribute.node.attr for attribute in module.attributes if attribute.value is not None}
    return ("chat_template" in assigned or "setup_chat_format" in called) and "save_pretrained" not in called


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
    return ""


def _may_have(module: str, name: str) -> bool:
    if module == "transformers":
        return name in dir(transformers) or is_installed(f"{module}.{name}")
    return has_name(module, name) is not False


def _is_foreign_trainer(path: str) -> bool:
    return path.endswith("Trainer") and package_of(path) not in (*PACKAGES, "transformers", "unsloth", "")


def _takes_num_items(node: ast.AST) -> bool:
    """Whether a method takes `num_items_in_batch`."""
    if not isinstance(node, ast.FunctionDef):
        return True
    names = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
    return node.args.kwarg is not None or "num_items_in_batch" in names


def _creates_refused_optimizer(node: ast.AST, module: Module) -> bool:
    """Whether a method creates an optimizer of torch or bitsandbytes that is not accepted."""
    scope = module.scopes.get(node, module.top)
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    callees = [meaning for func in functions for meaning in meanings(func, scope) if isinstance(meaning, Imported)]
    return any(
        callee.path.startswith(("torch.optim.", "bitsandbytes.optim."))
        and not callee.path.startswith("torch.optim.lr_scheduler.")
        and not (callee.path.startswith("torch.optim.") and short_name(callee) in TORCH_OPTIMIZERS)
        for callee in callees
    )


# Methods of tensors that arrays lack, or that need concrete values while a loss is traced.
_TENSOR_METHODS = frozenset(
    "clamp contiguous cpu cuda detach item long masked_fill new_tensor numel permute scatter_ unsqueeze".split()
)


_LOSSES = ("compute_loss", "_compute_loss")


def _loss_failure(node: ast.AST, trainer: type) -> str:
    """Why an overridden loss fails because of something that it calls; "" if it does not."""
    called = [ast.unparse(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)]
    if any(name.endswith(".backward") for name in called):
        return "It calls .backward(): trl_jax takes the gradient of what the method returns."
    if any(f"{model}.{method}" in called for model in _MODELS for method in ("parameters", "named_parameters")):
        return "It reads the model's parameters, which have no gradient in a loss. For a penalty set weight_decay."
    if "_get_per_token_logps_and_entropies" in dir(trainer) and "_get_per_token_divergences" not in dir(trainer):
        forbidden, instead = _MODELS[1:], "model(...), or self._get_per_token_logps_and_entropies(model, ...)"
    elif any(isinstance(child, ast.Attribute) and child.attr == "precompute_ref_logps" for child in ast.walk(node)):
        return ""  # like TRL's own loss, it only calls the reference model if this is false
    else:
        forbidden, instead = ("self.model", "self.ref_model"), "model(...), and inputs for what the reference gives"
    name = next((name for name in called if name in forbidden), None)
    return "" if name is None else f"It calls {name}(...), which is not available inside a loss. Use {instead}."


_MODELS = ("model", "self.model", "self.ref_model")


def _uses_torch(node: ast.AST, module: Module) -> bool:
    """Whether a method uses torch, or calls methods that only tensors have."""
    scope = module.scopes.get(node, module.top)
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    return any(isinstance(func, ast.Attribute) and func.attr in _TENSOR_METHODS for func in calls) or any(
        isinstance(meaning, Imported) and package_of(meaning.path) == "torch"
        for child in ast.walk(node)
        if isinstance(child, ast.Name)
        for meaning in meanings(child, scope)
    )
