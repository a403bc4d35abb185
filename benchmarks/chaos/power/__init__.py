"""A simulated power cut: files go back to their last sync, and what was acknowledged must still be there."""
