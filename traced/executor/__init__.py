"""Where stages run: as supervised child processes, with attempts that are counted and inputs that are parked."""
