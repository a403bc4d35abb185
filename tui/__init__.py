"""The terminal interface: a Textual client of the daemon's control API.

Of this project it imports only ``traced.client``, ``traced.processes.parent`` and ``store.text``, and no other
installed package imports it. Opening and closing it changes nothing in the daemon: every change is a request that a
person has confirmed.
"""
