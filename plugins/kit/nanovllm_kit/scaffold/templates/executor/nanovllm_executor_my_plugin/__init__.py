"""One worker in this process, and the time of each step."""
