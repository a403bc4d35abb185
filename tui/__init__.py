"""The terminal interface: a Textual client of the daemon's control API.

It imports ``traced.client`` and a few rules that need nothing else; nothing of ours imports it. Opening and closing it
changes nothing in the daemon: every change is a request that a person has confirmed.
"""
