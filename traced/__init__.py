"""traced: what happens. Importing it makes the cycles' checkpoints strict, here and in the processes started here."""

import os

os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"  # LangGraph reads it once, when it is imported
