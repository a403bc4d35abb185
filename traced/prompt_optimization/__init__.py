"""A prompt instead of an adapter: a text at the end of the system prompt, evolved where an adapter would be trained.

    prompted.py     the text at its place, and a policy that plays with it
    asking.py       a synchronous library at work in a thread, everything that it asks for done on the event loop
    evolution.py    ``gepa`` evolves the text on episodes, within a budget of them
    reflection.py   what a language model is asked for, and what of its answer is a text
    enough.py       what the gates' answers mean together: a prompt is enough, the adapter is needed, neither

Where episodes, budgets and rows come from: ``traced.pipeline.optimize_prompt``.
"""
