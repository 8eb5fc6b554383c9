"""Fair share of tokens by tenant."""
