"""The terminal interface: a Textual client of the daemon's control API.

It imports ``traced.client`` and nothing else of ours; nothing of ours imports it. Opening and closing it changes
nothing in the daemon: every act is a request that a person has confirmed.
"""
