"""What is installed and how it is loaded: kinds, hooks, discovery, checks, the plugin manager."""
