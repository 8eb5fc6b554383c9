"""An answer of few characters."""
