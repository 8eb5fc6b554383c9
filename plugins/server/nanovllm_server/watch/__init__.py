"""What an operator sees of the server: metrics, health, facts, traces; and plugins with routes."""
