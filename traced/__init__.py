"""A daemon that improves an LLM agent: it collects rollouts, analyses failures, trains and promotes LoRA adapters.

Importing this package makes LangGraph read checkpoints strictly, in this process and in the processes that it starts.
"""

import os

os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"  # LangGraph reads it once, when it is imported
