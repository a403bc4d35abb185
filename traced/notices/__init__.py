"""Telling people outside that they are needed, or that something is parked: webhooks and commands."""
