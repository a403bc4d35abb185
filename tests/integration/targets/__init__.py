"""Targets that are packages of others."""
