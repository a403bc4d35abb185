"""Decisions of many clients on a service that fails in many ways, checked against a sequential model."""
