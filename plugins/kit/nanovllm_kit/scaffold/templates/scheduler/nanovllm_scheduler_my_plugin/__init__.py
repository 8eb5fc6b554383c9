"""Short answers first, with ageing."""
