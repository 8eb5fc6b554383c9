"""A small decoder whose MLPs are mixtures of experts."""
