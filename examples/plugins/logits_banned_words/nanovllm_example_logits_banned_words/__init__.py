"""Words and token ids that a request must not write."""
