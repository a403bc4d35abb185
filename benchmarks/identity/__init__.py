"""A seeded simulation that judges how the router recognises conversations."""
