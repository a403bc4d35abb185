"""Target environments: the agents' workplaces that a cycle improves."""
