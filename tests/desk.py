"""The bundled desk as a target that is played in this process, for tests that need any target."""

from tests.local_source import LocalSource
from traced.targets.description import SEEDS, Description, Division
from traced.targets.desk import Desk
from traced.targets.registry import Target

DESK = Target("desk", Division(SEEDS), Description(gold=True), lambda _: LocalSource("desk", Desk))
