"""An executor that runs the worker in a process of its own."""
