"""Names that are not nouns of the field: the list, and a check that prints each of them.

    python scripts/banned_names.py [PATH ...]

A name is split at underscores and at camel case and compared in lower case. A word of ``BANNED`` is banned in every
position, and so are two words in a row of ``BANNED_PAIRS``; a word of ``BANNED_ALONE`` only where it is the whole name:
``known`` says nothing, ``known_hosts`` does.
Functions and methods may be verbs: a word of ``VERBS`` is permitted at the head of their names.

The bound names of a file are its module, functions, classes, parameters, assigned variables, attributes assigned on
``self`` and import aliases. Each name counts once in each scope; lambdas and comprehensions belong to the function
around them. ``self``, ``cls``, ``_`` and the names of tests, which are sentences, are left out. ``banned_names.toml``
lists by file the names that stay because they are stored or published. Exit code 1 when a name is banned. Run it in the
root of the repository. Standard library only.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGES = ("traced", "agents", "sandbox", "store", "tui")
DEVELOPMENT = ("tests", "benchmarks")
TEST_DATA = ("tests/data", "tests/fixtures")  # environments and attacks that tests read as data
EXCEPTIONS = Path(__file__).with_name("banned_names.toml")

# Words without an honest use in any position: speech verbs and pronouns, then words this
# project alone used for an established term (``standing`` for status, ``twin`` for counterfactual).
_WORDS = """
    found gone heard said saying says spoken told wanted what who whom whose why
    blame blamed commission doors habits lately lend lends lent look manners parked parking slips standing standings
    station stations surroundings twin twins untold wish wishes yielded yielding
"""
# Words that are fine beside a noun and say nothing alone.
_PRONOUNS = """
    another any both each either every few fewer he her his it its least less many more most much neither none of
    one ones others ours own same several she such that their them these they this those which whole
"""
_ADVERBS = """
    about above after again against alike almost alone already also although always anew apart as aside at because
    before beside beyond by early else enough ever for from hence here how if in instead into meanwhile never off on
    once only onto over since so soon still then there though thus too twice under until upon when where whether
    while with within without yet
"""
_ADJECTIVES = """
    bare due greatest longest newest oldest plain present quiet short shortest widest
"""
_PARTICIPLES = """
    admitted answered asked asking begun borrowed bought broken brought built called came carried caught checked
    chosen cited claimed coming compared copied counted covered crossed damaged decided described doing drawn driven
    emptied ended entered exercised filled fired fitted followed following forced forgotten formed gained gave given
    giving going got granted grown guessed handed handled happened having held judged judging kept knew knowing
    known labelled lacking laid landed learnt led lifted listed lived looked looking lost lowered made making marked
    meant measured mended met mined missed mixed moved named naming needed needing noted noticed obeyed offered
    opened opening ordered owed owned packed paid picked placed planned planted played playing pointed promised
    promoted proposed proven pulled pushed put ran reached reading reckoned recorded refused replaced replied
    reported rested saved saw seeing seen sent served settled shaped shown signed solved sought spent spoke staged
    stated stayed stood stored struck supplied swapped taken taking taught telling thought took trained treated
    tried turned unsettled waited walked warned wasted watched weighed went wished won worked worn written wrote
"""
# Verbs may be whole names of functions and methods.
_VERBS = """
    act ask be become begin blame borrow bring choose come cut did do does find get give go had has have hear hold
    keep know lend lift look make may might must pace put read say see seek should stand stay take tell want was
    were wish would
"""
# More words of that kind; beside another word they may be terms (tau_bench, looks_like).
_PRIVATE = "acting acts bench deed looks room"

# Words that are fine apart and stood together for an established term: blocked, requested.
BANNED_PAIRS = frozenset({("held", "up"), ("asked", "for")})

BANNED = frozenset(_WORDS.split())
VERBS = frozenset(_VERBS.split())
BANNED_ALONE = VERBS.union(*(words.split() for words in (_PRONOUNS, _ADVERBS, _ADJECTIVES, _PARTICIPLES, _PRIVATE)))

# Exact names that stay, with the reason.
ALLOWED: Mapping[str, str] = {
    "at": "a moment in stored rows and API bodies, as in created_at",
    "NotFound": "the established term for a missing record (HTTP 404)",
    "not_found": "the established term for a missing record (HTTP 404)",
}

_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_SKIPPED = {"self", "cls"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A function named ``of`` is the usual short factory method: ``Interval.of(samples)``.
_FUNCTION_HEADS = VERBS | {"of"}


@dataclass(frozen=True)
class Name:
    """A bound name and the first line that binds it."""

    text: str
    line: int
    function: bool = False

    @property
    def banned_word(self) -> str | None:
        """The word, or the pair of words, that bans the name; None for a good name."""
        if self.text in ALLOWED:
            return None
        words = [part.lower() for part in _PART.findall(self.text)]
        if self.function and words and words[0] in _FUNCTION_HEADS:
            words[0] = ""
        extra = BANNED_ALONE if len(words) == 1 else frozenset[str]()
        pairs = (" ".join(pair) for pair in pairwise(words) if pair in BANNED_PAIRS)
        return next((word for word in words if word in BANNED or word in extra), next(pairs, None))


def names_in(path: Path) -> list[Name]:
    """Every bound name of a Python file, its module first, then by line."""
    names: dict[tuple[ast.AST, str], Name] = {}
    tree = ast.parse(path.read_bytes(), str(path))
    for scope, name in _bindings(tree):
        key = (scope, name.text)
        if name.text in _SKIPPED or not name.text.strip("_") or (name.function and name.text.startswith("test_")):
            continue
        if key not in names or name.line < names[key].line:
            names[key] = name
    module = path.parent.name if path.stem == "__init__" else path.stem
    return [Name(module, 1), *sorted(names.values(), key=lambda name: name.line)]


def _bindings(tree: ast.Module) -> Iterator[tuple[ast.AST, Name]]:
    """Each binding with its scope; attributes of ``self`` belong to the class."""
    nodes: list[tuple[ast.AST, ast.AST, ast.AST]] = [(tree, tree, tree)]
    while nodes:
        node, scope, owner = nodes.pop()
        if (name := _binding(node)) is not None:
            yield (owner if isinstance(node, ast.Attribute) else scope), name
        if isinstance(node, ast.ClassDef):
            scope = owner = node
        elif isinstance(node, _FUNCTIONS):
            scope = node
        nodes.extend((child, scope, owner) for child in ast.iter_child_nodes(node))


def _binding(node: ast.AST) -> Name | None:
    """The name that this node itself binds."""
    text: str | None = None
    match node:
        case ast.Name(id=text, ctx=ast.Store()) | ast.arg(arg=text):
            pass
        case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
            pass
        case ast.Attribute(value=ast.Name(id="self"), attr=text, ctx=ast.Store()):
            pass
        case ast.alias(asname=text) | ast.ExceptHandler(name=text) | ast.MatchAs(name=text):
            pass
        case ast.MatchStar(name=text) | ast.MatchMapping(rest=text):
            pass
    if text is None:
        return None
    return Name(text, getattr(node, "lineno", 1), isinstance(node, _FUNCTIONS))


def python_files(paths: Iterable[Path]) -> list[Path]:
    """The Python files among the paths and below them, without test data."""
    files = (path.rglob("*.py") if path.is_dir() else [path] for path in paths)
    return sorted(file for group in files for file in group if not file.as_posix().startswith(TEST_DATA))


def exceptions(path: Path) -> dict[str, frozenset[str]]:
    """The names that stay, by file; "*" is every name of a file."""
    groups = tomllib.loads(path.read_text("utf-8"))["exception"]
    return {file: frozenset(names.split()) for group in groups for file, names in group["files"].items()}


def main(paths: Sequence[str] = PACKAGES + DEVELOPMENT) -> int:
    """Print each banned name as path:line: name, and each exception that is not needed; returns the exit code."""
    files, permitted = python_files(map(Path, paths)), exceptions(EXCEPTIONS)
    hits: list[str] = []
    for file in files:
        stays = permitted.get(file.as_posix(), frozenset())
        banned = [name for name in names_in(file) if name.banned_word]
        if "*" not in stays:
            names = (name for name in banned if name.text not in stays)
            hits += [f"{file}:{name.line}: {name.text} ({name.banned_word})" for name in names]
        unused = stays - {name.text for name in banned} - {"*"}
        hits += [f"{file}: {name} is not banned: delete it in {EXCEPTIONS.name}" for name in sorted(unused)]
    hits += [f"{EXCEPTIONS.name}: there is no {file}" for file in permitted if not Path(file).exists()]
    print("\n".join([*hits, f"{len(hits)} banned names"]))
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PACKAGES + DEVELOPMENT))
