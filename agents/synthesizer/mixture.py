"""Write one environment file out of several: its seed ``s`` is the seed ``s`` of the environment number ``s`` mod n.

An adapter for several capabilities is trained and judged in it. Seeds keep their numbers, so the seeds that training,
gates and routers use stay apart in the mixture as they do in each member.

Each member becomes the body of a function, so their names do not meet. Not covered: star imports and module variables
that a member deletes.
"""

import ast
import contextlib
from collections.abc import Iterator, Sequence

HEADER = '''"""Mixture of {count} synthetic environments: seed s is that of the environment number s mod {count}."""
'''
RUNTIME = '''
class Environment:
    """The environment of the seed's number."""
{description}
    def __init__(self):
        self._member = None

    def reset(self, seed):
        self._member = MEMBERS[seed % len(MEMBERS)]()
        return self._member.reset(seed)

    def step(self, message):
        return self._member.step(message)

    @property
    def done(self):
        return self._member.done

    def score(self):
        return self._member.score()

    def oracle(self):
        yield from self._member.oracle()

    @property
    def user_request(self):
        try:
            return self._member.user_request
        except AttributeError:
            return None
'''


class MixtureError(ValueError):
    """A member that cannot be part of a mixture; the message says why."""


def mix(sources: Sequence[str]) -> str:
    """Return the source of the mixture of these environments, in their order.

    Raises:
        MixtureError: A source does not parse, imports everything of a module, or there are fewer than two.
    """
    if len(sources) < 2:
        raise MixtureError("a mixture has at least two environments")
    bodies: list[str] = []
    users: dict[str, None] = {}
    future: dict[str, None] = {}
    for number, source in enumerate(sources):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise MixtureError(f"environment {number} does not parse: {error}") from error
        future |= dict.fromkeys(_future_names(tree))
        users |= dict.fromkeys(_users(tree))
        bodies.append(ast.unparse(ast.fix_missing_locations(_as_function(tree, number))))
    imports = f"from __future__ import {', '.join(future)}\n" if future else ""
    members = ", ".join(f"_member_{number}()" for number in range(len(sources)))
    description = f'\n    description = {{"user": {next(iter(users))!r}}}\n' if users else ""
    runtime = RUNTIME.format(description=description)
    return "\n".join([HEADER.format(count=len(sources)) + imports, *bodies, f"\nMEMBERS = [{members}]\n", runtime])


def _as_function(tree: ast.Module, number: int) -> ast.Module:
    """Return a module with one function, which has the member as its body and returns its class."""
    body = [node for node in tree.body if not _is_future(node)]
    for node in (child for statement in body for child in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            raise MixtureError(f"environment {number} imports everything of {node.module}")
    body = [_Nonlocal().visit(node) for node in body]
    body.append(ast.Return(ast.Name("Environment", ast.Load())))
    arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    function = ast.FunctionDef(name=f"_member_{number}", args=arguments, body=body, decorator_list=[])
    return ast.Module(body=[function], type_ignores=[])


class _Nonlocal(ast.NodeTransformer):
    """Global names of a member are names of its function."""

    def visit_Global(self, node: ast.Global) -> ast.Nonlocal:
        return ast.Nonlocal(names=node.names)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _future_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield from (alias.name for alias in node.names)


def _users(tree: ast.Module) -> Iterator[str]:
    """Yield who the user of the environment is, if its description says so."""
    for node in (child for statement in tree.body if isinstance(statement, ast.ClassDef) for child in statement.body):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="description")], value=value)
                | ast.AnnAssign(target=ast.Name(id="description"), value=ast.expr() as value)
            ):
                with contextlib.suppress(ValueError, TypeError, SyntaxError):
                    content = ast.literal_eval(value)
                    if isinstance(content, dict) and isinstance(content.get("user"), str):
                        yield content["user"]
