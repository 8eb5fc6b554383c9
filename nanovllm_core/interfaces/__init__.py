"""The contracts between the core and its plugins, and the plain data that crosses them.

Nothing in this package imports torch: the engine and every plugin's spec module read it.
"""
