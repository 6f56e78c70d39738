"""Compare two TRL releases: list what is new, and what of it is missing here.

    python compat_tests/trl_news.py OLD NEW

OLD and NEW are folders that contain the `trl` package of an unpacked wheel. Sources are parsed, never imported.
"""

import argparse
import ast
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "trl_jax"


@dataclass
class Source:
    """The classes and public names of a package, as its files declare them."""

    fields: dict[str, dict[str, str]] = field(default_factory=dict)  # class -> field -> default, as source
    methods: dict[str, set[str]] = field(default_factory=dict)  # class -> public methods
    bases: dict[str, list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # top-level public functions and classes

    def inherited(self, table: dict, name: str) -> set[str]:
        """Members of a class and of its bases in the same package."""
        found, queue, seen = set(), [name], set()
        while queue:
            current = queue.pop()
            if current in seen:
                continue
            seen.add(current)
            found |= set(table.get(current, ()))
            queue += self.bases.get(current, [])
        return found


def _default(value: ast.expr | None) -> str:
    """The default of a dataclass field as source, without its help text."""
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {k.arg: k.value for k in value.keywords}
        chosen = given.get("default", given.get("default_factory"))
        return "required" if chosen is None else ast.unparse(chosen)
    return ast.unparse(value)


def read(root: Path) -> Source:
    """Parse every file under `root`. Raises FileNotFoundError if there is none."""
    files = sorted(root.rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"{root} holds no Python file; pass the folder of an unpacked package")
    source = Source()
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                source.names.add(node.name)
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            source.bases.setdefault(node.name, []).extend(bases)
            fields = source.fields.setdefault(node.name, {})
            methods = source.methods.setdefault(node.name, set())
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    fields[item.target.id] = _default(item.value)
                elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    methods.add(item.name)
    return source


def news(old: Source, new: Source, ours: Source) -> list[str]:
    """One line per difference; `MISSING` marks an addition that `ours` does not declare."""

    def mark(covered: bool) -> str:
        return "" if covered else "  MISSING"

    lines = [f"name + {n}{mark(n in ours.names)}" for n in sorted(new.names - old.names)]
    lines += [f"name - {n}" for n in sorted(old.names - new.names)]
    for name in sorted(n for n in new.fields if n.endswith("Config")):
        before, after = old.fields.get(name, {}), new.fields[name]
        known = ours.inherited(ours.fields, name)
        lines += [f"{name}.{f} + {after[f]}{mark(f in known)}" for f in after if f not in before]
        lines += [f"{name}.{f} -" for f in before if f not in after]
        lines += [f"{name}.{f}: {before[f]} -> {after[f]}" for f in after if f in before and before[f] != after[f]]
    for name in sorted(n for n in new.methods if n.endswith("Trainer")):
        before, after = old.methods.get(name, set()), new.methods[name]
        known = ours.inherited(ours.methods, name)
        lines += [f"{name}.{m}() +{mark(m in known)}" for m in sorted(after - before)]
        lines += [f"{name}.{m}() -" for m in sorted(before - after)]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args()
    print("\n".join(news(read(given.old), read(given.new), read(HERE))) or "no difference")
