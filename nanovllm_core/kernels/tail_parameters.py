"""The layout of what a row asks of the captured tail: int32 columns, floats by their bits.

Host and kernels read it here. Of a row without flags only NUM_TOP is read (-1: no
log-probabilities).
"""

from __future__ import annotations

FLAGS = 0
TOP_K = 1
"""The vocabulary or more: no limit."""
TOP_P = 2
"""Above 1: no limit."""
LOG_MIN_P = 3
"""-inf: no limit."""
REPETITION = 4
PRESENCE = 5
FREQUENCY = 6
NUM_TOP = 7
NUM_BIASES = 8
COUNTED = 9
"""The known ids that the count table has; the device writes it. -1: it has another request's."""
NUM_COLUMNS = 12

CUT = 1
PENALISED = 2
BIASED = 4
FORBIDS = 8
FLOORED = 16
"""Set by kernels only, while ids below a floor (min_p) are forbidden."""

MAX_BIASES = 320
"""Logit biases of a row that the captured tail takes; OpenAI's own limit is 300."""
MAX_TOP = 20
"""Log-probabilities of a row that the captured tail takes beside the chosen id's."""
