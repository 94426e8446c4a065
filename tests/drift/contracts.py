"""The rows of the table that released versions lack, found in their sources without importing anything."""

import ast
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.holdings import fsdp
from hf_zero_stream.registry import Row, Severity


PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft")

PYTHON_OF_TORCH = (
    *("--only-binary=:all:", "--python-version", "3.12"),
    *("--platform", "macosx_14_0_arm64", "--platform", "macosx_11_0_arm64"),
)
"""Has pip download torch's wheel for macOS: its Python is that of all others, which are gigabytes."""

ATTRIBUTES = {"torch": ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam", fsdp.RELIED_ON)}
"""By package: a class of a module, and what we read of its objects; with "|" between names one is enough."""

OURS, FOLDER = Path("hf_zero_stream"), Path(".drift") / "sources"


def released(package: str, allowed: SpecifierSet) -> list[str]:
    """The newest patch of each minor version that is allowed."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True, check=True
    )
    line = next(line for line in listing.stdout.splitlines() if line.startswith("Available versions:"))
    newest: dict[tuple[int, ...], Version] = {}
    for each in line.partition(":")[2].replace(" ", "").split(","):
        version = Version(Version(each).public)  # a build for CPUs has another name
        minor = version.release[:2]
        if version in allowed and version > newest.get(minor, Version("0")):
            newest[minor] = version
    return [str(version) for _, version in sorted(newest.items())]


def source_of(package: str, version: str) -> Path:
    """The wheel or the source distribution of a version, downloaded once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}-{version}[-.]*"
    if not list(FOLDER.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        pip += PYTHON_OF_TORCH if package == "torch" else ()
        subprocess.run([*pip, "--dest", str(FOLDER), f"{package}=={version}"], check=True)
    return next(FOLDER.glob(pattern))


class Sources:
    """The modules of a distribution, parsed when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._texts: dict[str, bytes] = {}
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                self._texts = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}
        else:
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.isfile() and member.name.endswith(".py"):
                        file = archive.extractfile(member)
                        assert file is not None
                        self._texts[member.name.partition("/")[2]] = file.read()
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            path = name.replace(".", "/")
            text = self._texts.get(f"{path}.py", self._texts.get(f"{path}/__init__.py"))
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]


def _names(node: ast.AST) -> Iterator[str]:
    """What a statement gives a name to."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _found(tree: ast.Module, name: str) -> ast.AST | None:
    return next((node for node in ast.walk(tree) if name in _names(node)), None)


def _method(tree: ast.Module, owner: ast.ClassDef, name: str) -> ast.AST | None:
    """A method of a class, or of one that it inherits from in its module; the import that hides where else it is."""
    for node in owner.body:
        if name in _names(node):
            return node
    for base in owner.bases:
        found = _found(tree, base.id) if isinstance(base, ast.Name) else None
        method = _method(tree, found, name) if isinstance(found, ast.ClassDef) else found
        if method is not None:
            return method
    return None


def lacking(sources: Sources, row: Row) -> str:
    """What these sources lack of a row, as :meth:`.install.Row.lacking` says it of an installed version."""
    tree = sources.module(row.module)
    *owners, name = row.of.partition(":")[2].split(".")
    if tree is None:
        return row.name
    if owners and not owners[0].isidentifier():  # only known at run time
        return ""
    owner = _found(tree, owners[0]) if owners else None
    found = _method(tree, owner, name) if isinstance(owner, ast.ClassDef) else owner or _found(tree, name)
    if found is None:
        return row.name
    if isinstance(found, ast.FunctionDef) and found.args.kwarg is None:
        arguments = found.args
        known = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if unknown := [each for each in row.relies_on.split() if each not in known]:
            return f"{row.name}({', '.join(unknown)})"
    return ""


def without_attributes(sources: Sources, module: str, name: str, wanted: Sequence[str]) -> list[str]:
    """What no code of a class of these sources gives its objects, of the names that are `wanted`."""
    tree = sources.module(module)
    owner = None if tree is None else _found(tree, name)
    if owner is None:
        return [f"{module}:{name}"]
    known = {name for node in ast.walk(owner) for name in _names(node)}
    known |= {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    return [f"{name}.{each}" for each in wanted if known.isdisjoint(each.split("|"))]


def required(module: str) -> Iterator[Row]:
    """The names that the text of a module of ours requires of classes, which it imports by their names."""
    tree = ast.parse(module)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    homes = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require_names":
            home, owner = homes.get(getattr(call.args[1], "id", ""), ("", ""))
            texts = [each.value for arg in call.args[2:] for each in ast.walk(arg) if isinstance(each, ast.Constant)]
            if home and owner[0].isupper():  # a class
                yield from (Row(f"{home}:{owner}.{name}", "", severity=Severity.ESSENTIAL) for name in texts)


def required_names() -> list[Row]:
    return [row for path in OURS.rglob("*.py") for row in required(path.read_text()) if "." in row.module]


def faults(package: str, version: str) -> dict[Severity, list[str]]:
    """What a version lacks that the table, or a module of ours, says it has, by what that means."""
    sources = Sources(source_of(package, version))
    found: dict[Severity, list[str]] = {}
    for row in chain(*TABLE.values(), required_names()):
        if row.package == package and row.exists_in(version) and (what := lacking(sources, row)):
            found.setdefault(row.severity, []).append(what)
    if package in ATTRIBUTES and (names := without_attributes(sources, *ATTRIBUTES[package])):
        found.setdefault(Severity.ESSENTIAL, []).extend(names)
    return found
