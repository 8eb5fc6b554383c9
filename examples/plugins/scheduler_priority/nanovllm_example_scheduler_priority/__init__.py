"""Priority classes with ageing."""
