"""Lower what was written a moment ago."""
