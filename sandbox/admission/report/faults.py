"""What to change where a check ended by a fault of the environment, from the fault's own words."""

import re
from collections.abc import Iterator

from sandbox.admission.report.measured import Evidence
from store.plain import line

QUOTED = 300  # characters of somebody else's words inside a sentence
PLACE = re.compile(r'File "environment\.py", line (\d+), in (\S+)')
RAISED = {
    "load": "Importing the module must only define things: no work, no input, nothing that depends on the machine.",
    "reset": "reset(seed) must return a Task for every seed, whatever was played before it.",
    "step": "step(message) must answer every assistant message, also one with unknown tools, broken JSON, missing "
    "arguments or no text at all: answer a bad call with a tool message that tells the error.",
    "score": "score() must return a Score at any time, also right after reset: reward a number from 0 to 1, success "
    "True only with reward 1.0.",
    "oracle": "oracle() must yield assistant messages that step() can take, each built from the state as it is then.",
}


def of_fault(evidence: Evidence) -> Iterator[str]:
    """Sentences by the kind of fault."""
    text = str(evidence.get("text", ""))
    where = f" ({line(evidence['at'])})" if evidence.get("at") else ""
    match evidence.get("fault"):
        case "EnvironmentFault":
            yield f"It failed{where}: {line(text, QUOTED)}"
            if "SyntaxError" in text and _operation(text) in ("load", ""):
                yield "Mend the line that the error names: the file must be valid Python."
            else:
                yield RAISED.get(_operation(text), "No seed and no message may make the environment raise.")
            places = PLACE.findall(str(evidence.get("traceback", "")))
            if places:
                yield f"It raised at line {places[-1][0]} of the file, in {line(places[-1][1], 60)}."
        case "Deadline":
            yield f"A call took too long{where}: {line(text, QUOTED)}"
            yield (
                "Look for a loop that some input never ends and for work that grows with the number of records; build "
                "large tables once, when the module is imported."
            )
        case "WorkerDied" if "memory" in text:
            yield f"The environment used up its container's memory{where}."
            yield "Keep only this episode's records on self, and bound every list, text and loop."
        case "WorkerDied":
            yield f"The environment's process ended{where}: {line(text, QUOTED)}"
            yield "Remove whatever ends or replaces the process: exit calls, signals, deep recursion, native code."
        case "ProtocolFault":
            yield f"What the environment's process said is not the protocol{where}: {line(text, QUOTED)}"
            yield "Remove every write to standard output or to file descriptors, and keep messages small."
        case _:
            yield f"The episode was lost{where}: {line(text, QUOTED)}"
            yield "Admit it once more; if it is lost again, the environment ends its own process."


def _operation(text: str) -> str:
    found = re.search(r"environment failed in '(\w+)'", text)
    return found[1] if found else ""
